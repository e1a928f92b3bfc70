"""Layers of the lean path, built from a plan and the modules of a loaded model."""
