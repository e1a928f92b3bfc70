"""Where an engine computes."""

from __future__ import annotations

from typing import Annotated

from ..options.groups import OptionGroup
from ..options.numbers import Integer
from ..options.option import Option
from ..options.readers import Choice

PLACE = "where"
# What no machine has, and no deployment means. Beyond it arrays are made that do not fit, or processes without end.
MAX_ENGINES_ON_HOST = 1024


class PlaceOptions(OptionGroup):
    """On which device, and with how much of its host.

    Args:
        num_engines_on_host: how many engines share the host's memory and cores.
    """

    device: Annotated[
        str, Option("cpu, or cuda: a visible GPU for each rank of an engine", Choice("cpu", "cuda"), group=PLACE)
    ] = "cpu"
    num_threads: Annotated[
        int,
        Option("threads of each CPU engine; 0 chooses", Integer(0, 1024, "0 chooses"), name="threads", group=PLACE),
    ] = 0
    num_engines_on_host: Annotated[int, Integer(1, MAX_ENGINES_ON_HOST)] = 1
