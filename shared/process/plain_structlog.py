"""Imports structlog without rich. Our programs import it before everything else.

structlog imports rich if it is installed, for tracebacks that show local variables, prompts included. Our processes
never print those (``log.py``), and rich is a fifth of the imports of a worker process. A program that imports Penstock
has its usual structlog.
"""

from __future__ import annotations

import sys

if "structlog" not in sys.modules and "rich" not in sys.modules:
    sys.modules["rich"] = None  # type: ignore[assignment]  # so that it cannot be imported for a moment
    try:
        import structlog  # noqa: F401  # remembers whether it has rich
    finally:
        del sys.modules["rich"]
