"""The process of an engine core, whatever computes the tokens: its loop, its interface, its answers to calls."""
