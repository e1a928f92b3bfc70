from __future__ import annotations

from ..supervisor.conftest import start_worker

__all__ = ["start_worker"]
