"""Guesses at what requests will say next, which the step that computes them verifies (decision 0083)."""
