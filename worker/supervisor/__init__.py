"""Supervisor of ``worker start``: starts, watches, restarts and stops one worker process per engine.

    supervisor ──configuration, life line──▶ worker process ──▶ engine core process
               ◀──WorkerStatus lines───────

The supervisor serves no requests and imports no torch. Read ``supervisor.py``, then ``supervised_engine.py`` (an engine
across restarts), ``engine_process.py`` (one process of it) and ``restart.py`` (the policy). ``reaper.py``,
``SilenceWatch`` and ``DeathNotices`` each run a loop. ``fork_server.py`` keeps the process that forks engine cores.
"""

from .placement import Placement, place_engines
from .supervisor import EngineStartError, Supervisor

__all__ = ["EngineStartError", "Placement", "Supervisor", "place_engines"]
