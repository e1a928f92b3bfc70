"""Read the structure of a model's layers from its own forward, as a plan of the lean path."""
