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
            "serve on the hosts of a Ray cluster, with as many of `--engines LEAST:MOST` as the queue asks for: its "
            "address, or auto for that of this host",
            Reader("ADDRESS"),
            group=FLEET,
        ),
    ] = None
    wanted_wait_s: Annotated[
        float,
        Option(
            "how long what waits may take to be served: if it would take longer, engines are added",
            Seconds(0.1),
            name="wanted_wait",
            group=FLEET,
        ),
    ] = DEFAULT_WANTED_WAIT_S
    shrink_after_s: Annotated[
        float,
        Option(
            "for how long an engine has not been needed before it is drained",
            Seconds(0),
            name="shrink_after",
            group=FLEET,
        ),
    ] = 60.0
    placement_group: Annotated[
        str | None,
        Option(
            "place engines in the bundles of this group, which somebody has made in Ray's namespace `penstock`, "
            "instead of in groups of their own",
            Name(),
            name="ray_placement_group",
            group=FLEET,
        ),
    ] = None
