"""How an engine core's process says with its end what a traceback does not."""

from __future__ import annotations

# It could not go on since another rank of its data-parallel group is gone: neither it nor its requests are to blame.
GROUP_BROKEN = 4
