"""Options of engines that form a data-parallel group: ranks that share the experts of a model and step together."""

from __future__ import annotations

from typing import Annotated

import msgspec

from ...shared.errors import ConfigurationError
from ...shared.values.names import check_name
from ..options.numbers import Integer
from ..options.option import Option, OptionGroup
from ..options.readers import Reader

DATA_PARALLEL = "data-parallel groups"
_MAX_RANKS = 1024


class RankPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Place of a core's rank in its group, which the worker process reads from Redis (``shared/deployment/groups.py``).

    Args:
        generation: generation of the group.
        size: number of ranks of the group.
        address: HOST:PORT at which the ranks connect; the first rank listens there.
        timeout_s: how long a collective waits for a rank.
    """

    generation: int
    rank: int
    size: int
    address: str
    timeout_s: float


class DataParallelOptions(OptionGroup):
    """Options for the data-parallel group of an engine.

    Args:
        place: place of the engine's rank; None until it is known, and for an engine without a group.
    """

    data_parallel_size: Annotated[
        int,
        Option(
            "ranks of a group that share the experts of a mixture-of-experts model, each an engine with its own "
            "requests; all step together. For dense models start more engines",
            Integer(1, _MAX_RANKS),
            group=DATA_PARALLEL,
        ),
    ] = 1
    data_parallel_group: Annotated[
        str,
        Option(
            "name of a group over several hosts",
            Reader("NAME"),
            default="none: the engines of this host form groups",
            group=DATA_PARALLEL,
        ),
    ] = ""
    data_parallel_address: Annotated[
        str,
        Option(
            "address of this host for other ranks; required with --data-parallel-group",
            Reader("HOST"),
            default="127.0.0.1",
            group=DATA_PARALLEL,
        ),
    ] = ""
    place: RankPlace | None = None

    @property
    def is_grouped(self) -> bool:
        """Whether the engine is a rank of a group; a group with a single rank may grow."""
        return self.data_parallel_size > 1 or bool(self.data_parallel_group)


def check_data_parallel(
    options: DataParallelOptions,
    engine: str,
    device: str,
    *,
    deterministic: bool,
    async_scheduling: bool,
    enforce_eager: bool,
    num_ranks: int,
) -> None:
    """Raise ``ConfigurationError`` if an option would prevent ranks from stepping together.

    Each rank runs one forward in a step, and all ranks run the same number of forwards when they load.
    """
    if not options.is_grouped:
        if options.data_parallel_address:
            raise ConfigurationError("data_parallel_address is for data-parallel groups; set data_parallel_size, too")
        return
    if options.data_parallel_group:
        try:
            check_name("data_parallel_group", options.data_parallel_group)
        except ValueError as error:
            raise ConfigurationError(str(error)) from error
        if not options.data_parallel_address:
            raise ConfigurationError(
                "data_parallel_group needs data_parallel_address: the address of this host at which the others reach it"
            )
    refused = {
        f"engine '{engine}'": engine != "penstock",
        "deterministic": deterministic,
        "async_scheduling": async_scheduling,
        "tensor_parallel_size or pipeline_parallel_size": num_ranks > 1,
        "CUDA graphs (set enforce_eager)": device == "cuda" and not enforce_eager,
    }
    for name, is_on in refused.items():
        if is_on:
            raise ConfigurationError(
                f"data_parallel_size {options.data_parallel_size} cannot go with {name}: the ranks of a group make one "
                "forward each in a step, and the same ones at the start; leave one of them out"
            )
