"""Experts that ranks share: each holds some of every layer's, and computes the tokens of all ranks with them."""
