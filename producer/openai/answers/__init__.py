"""What answers are made of: ids, ends, usage, messages, log probabilities; whole or piece by piece."""
