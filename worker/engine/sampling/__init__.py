"""Sampling: the parameters of the running requests as arrays, the changes to logits, and the choice of tokens."""
