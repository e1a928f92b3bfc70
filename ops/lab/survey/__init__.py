"""Tries every causal language model of the installed transformers, small and random, through the engine."""
