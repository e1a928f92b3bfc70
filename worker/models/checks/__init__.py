"""Checks at load: our forward against the model's own, and the same results in any batch."""
