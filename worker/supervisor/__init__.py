"""What ``worker start`` runs: one worker process per engine, started, watched and taken down together.

    supervisor ──configuration, life line──▶ worker process ──▶ engine core process
               ◀──WorkerStatus lines───────

The supervisor serves nothing itself and imports no torch.
"""

from .placement import Placement, place_engines
from .supervisor import EngineStartError, Supervisor

__all__ = ["EngineStartError", "Placement", "Supervisor", "place_engines"]
