"""OpenAI's Responses API: bodies, the response object, its events, and its stored record."""
