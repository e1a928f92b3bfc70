"""Options of ``worker start --ray`` for a fleet (``worker/fleet``)."""

from __future__ import annotations

from typing import Annotated

import msgspec

from ..options.numbers import Seconds
from ..options.option import Option
from ..options.readers import Name, Reader

FLEET = "on a Ray cluster"
DEFAULT_WANTED_WAIT_S = 10.0


class FleetOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a fleet. Without ``ray`` a worker serves on its own host, and the others do not apply."""

    ray: Annotated[
        str | None,
        Option(
            "address of a Ray cluster, or auto for that of this host: serve on its hosts, with as many of "
            "`--engines MIN:MAX` as the queue needs",
            Reader("ADDRESS"),
            group=FLEET,
        ),
    ] = None
    wanted_wait_s: Annotated[
        float,
        Option(
            "longest time to serve the waiting requests: if it would take longer, engines are added",
            Seconds(0.1),
            name="wanted_wait",
            group=FLEET,
        ),
    ] = DEFAULT_WANTED_WAIT_S
    shrink_after_s: Annotated[
        float,
        Option(
            "time without need after which an engine is drained",
            Seconds(0),
            name="shrink_after",
            group=FLEET,
        ),
    ] = 60.0
    placement_group: Annotated[
        str | None,
        Option(
            "use the bundles of this existing group in Ray's namespace `penstock`, instead of new groups",
            Name(),
            name="ray_placement_group",
            group=FLEET,
        ),
    ] = None
