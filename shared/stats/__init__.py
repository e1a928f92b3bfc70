"""Counts and measurements of engines, as they are sent."""
