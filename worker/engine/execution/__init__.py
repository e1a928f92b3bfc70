"""One step's work on the model, and the memory that it needs."""
