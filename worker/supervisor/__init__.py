"""What ``worker start`` runs: one worker process per engine, started, watched, restarted and taken down.

    supervisor ──configuration, life line──▶ worker process ──▶ engine core process
               ◀──WorkerStatus lines───────

The supervisor serves nothing itself and imports no torch. Read ``supervisor.py``, ``engine.py`` (one engine through all
its lives), ``engine_process.py`` (one life), ``restart.py`` (the policy); beside them ``silence.py``, ``reaper.py`` and
``death_notices.py``, each a loop of its own; ``fork_server.py`` keeps the process that forks engine cores.
"""

from .placement import Placement, place_engines
from .supervisor import EngineStartError, Supervisor

__all__ = ["EngineStartError", "Placement", "Supervisor", "place_engines"]
