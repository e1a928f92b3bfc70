"""The OpenAI-compatible HTTP gateway: a thin, stateless face of the client. ``app.build_app`` puts it together.

Nothing of an answer lives here: requests, their tokens and their ends are in Redis, so any gateway process can go on
with a stream that another one began. Needs the extra ``penstock[gateway]``.
"""
