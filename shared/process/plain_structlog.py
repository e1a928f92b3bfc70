"""Imports structlog without rich; to be imported before all else by what is a program of ours.

structlog imports rich where it is there, for tracebacks that show local variables, prompts included; our processes
never print those (``log.py``). It is a fifth of what a worker process imports. Who imports Penstock into a program of
his own finds structlog as he likes it.
"""

from __future__ import annotations

import sys

if "structlog" not in sys.modules and "rich" not in sys.modules:
    sys.modules["rich"] = None  # type: ignore[assignment]  # so that it cannot be imported for a moment
    try:
        import structlog  # noqa: F401  # remembers whether it has rich
    finally:
        del sys.modules["rich"]
