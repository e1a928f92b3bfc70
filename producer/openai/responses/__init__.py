"""OpenAI's Responses API: bodies, the response object, its events, and what is kept of it."""
