"""The weights of a loaded model: how they leave the device, come back, are replaced and written to files."""
