"""The OpenAI-compatible HTTP gateway: a thin, stateless layer over the client. ``app.build_app`` assembles it.

A gateway process stores no answers. Requests, their tokens and their ends are in Redis, so any gateway process can
resume a stream that another one started. Needs the extra ``gateway``.
"""
