"""Reads from a model's own forward how its layers are made: which switches of the lean path stand where."""
