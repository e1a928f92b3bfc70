"""Checks at load: that a model computes the same our way as its own, and the same in any batch."""
