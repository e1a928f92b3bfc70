"""Options for the device of an engine."""

from __future__ import annotations

from typing import Annotated

from ..options.numbers import Integer
from ..options.option import Option, OptionGroup
from ..options.readers import Choice

PLACE = "devices"
# More than any machine has. A larger value would create arrays that do not fit, or processes without end.
MAX_ENGINES_ON_HOST = 1024


class PlaceOptions(OptionGroup):
    """Options for the device and the share of the host.

    Args:
        num_engines_on_host: number of engines that share the host's memory and cores.
    """

    device: Annotated[str, Option("cpu, or cuda: one visible GPU per rank", Choice("cpu", "cuda"), group=PLACE)] = "cpu"
    num_threads: Annotated[
        int,
        Option("threads of each CPU engine; 0 chooses", Integer(0, 1024, "0 chooses"), name="threads", group=PLACE),
    ] = 0
    num_engines_on_host: Annotated[int, Integer(1, MAX_ENGINES_ON_HOST)] = 1
