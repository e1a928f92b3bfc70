"""Commands that give models work."""
