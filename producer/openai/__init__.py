"""OpenAI's HTTP bodies as structs, and what they mean in Penstock's terms; knows no web framework.

``endpoints.prepare(path, body)`` is the way in: gateway, batches and responses all use it.
"""
