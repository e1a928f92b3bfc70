"""The client for callers that block."""
