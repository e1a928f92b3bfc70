"""Anthropic's Messages API: bodies as chat completions, and answers as content blocks, whole or as events."""
