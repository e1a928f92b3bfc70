"""Training of the models and adapters of ``penstock demo``."""
