"""Adapters of a deployment: what PEFT says of one, and the names that point to them."""
