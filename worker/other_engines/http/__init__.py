"""A server that completes token ids over HTTP, behind our loop (decision 0084): llama-server and SGLang.

``server.py`` finds out which it is and what it holds; ``llama.py`` and ``sglang.py`` are the two ``Dialect``s: what a
request is in their words, and what their answers say. ``plan.py`` decides what is asked for next, ``streams.py`` asks
in a thread of its own, ``core.py`` makes outputs of what comes. ``launcher.py`` and ``keeper.py`` start the server.
"""
