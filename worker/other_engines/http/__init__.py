"""A core that uses a server for completions of token ids over HTTP: llama-server or SGLang.

The reasons are in ops/decisions/other_engines.md.

``server.py`` detects the server and its model. ``llama.py`` and ``sglang.py`` implement ``Dialect``: they encode
requests and decode responses. ``plan.py`` plans the next call, ``streams.py`` makes calls in a separate thread, and
``core.py`` turns responses into outputs. ``launcher.py`` and ``keeper.py`` start the server.
"""
