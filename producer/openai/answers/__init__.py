"""Common parts of answers: ids, ends, usage, messages and log probabilities, as a whole or as a stream."""
