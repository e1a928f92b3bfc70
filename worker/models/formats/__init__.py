"""Checkpoints in fewer bits: what their configuration says, and their tensors made whole while they are read."""
