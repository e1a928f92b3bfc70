"""OpenAI's HTTP bodies as structs, and their translation to requests of the client; uses no web framework.

``endpoints.prepare(path, body)`` is the entry point of gateway, batches and responses.
"""
