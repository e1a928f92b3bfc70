"""Load a model: read its files, prepare it for its device, and choose the mode that computes it."""
