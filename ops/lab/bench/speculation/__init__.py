"""Gain of speculation: three kinds of answers and concurrent requests, with and without drafts.

The reasons are in ops/decisions/speculation.md.
"""
