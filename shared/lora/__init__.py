"""Adapters of a deployment: their PEFT configuration, and the names that point to them."""
