"""Execution of a step on the model, and the memory that it needs."""
