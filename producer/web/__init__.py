"""Serve web applications with uvicorn: the process, its connections, and the limits on what a caller may send."""
