"""Batches that are scheduled while others are still being computed."""
