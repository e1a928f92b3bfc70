"""A gateway of several processes: a parent that owns the socket, and children that serve on it.

The reasons are in ops/decisions/gateway.md.
"""

from .parent import serve_by_processes

__all__ = ["serve_by_processes"]
