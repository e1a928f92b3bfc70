"""A fork server that imports nothing before somebody asks: a run of tests that start no engine does without it."""

from __future__ import annotations

import os
import select
import sys

listener = int(sys.argv[sys.argv.index("--listen-fd") + 1])
if listener in select.select([listener, sys.stdin], [], [])[0]:
    from penstock.worker.engine import fork_server

    fork_server.main()
os._exit(0)
