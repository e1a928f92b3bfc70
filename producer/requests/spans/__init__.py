"""Spans of enqueue calls."""
