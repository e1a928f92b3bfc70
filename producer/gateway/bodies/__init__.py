"""Bodies of HTTP requests as they come, and what they name elsewhere."""
