"""A model's folder and checkpoint: read as a whole, or rejected with a message."""
