"""The weights of a loaded model: where they lie, how they leave, come back, are replaced and written to files."""
