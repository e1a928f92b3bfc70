"""Gain of speculation: three kinds of answers and concurrent requests, with and without drafts (decision 0083)."""
