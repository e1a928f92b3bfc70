"""Commands on what waits, runs and died."""
