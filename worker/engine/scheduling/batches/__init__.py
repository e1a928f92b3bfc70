"""Batches that are scheduled while earlier ones are still in flight."""
