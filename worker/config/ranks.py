"""Options for the devices of an engine, and for ranks that compute one model on several devices."""

from __future__ import annotations

from typing import Annotated

from ...shared.errors import ConfigurationError
from ..models.parallel.layout import ParallelLayout
from ..options.numbers import Integer
from ..options.option import Option, OptionGroup
from ..options.readers import Choice, Reader, Switch

RANKS = "ranks: several devices per engine"
# No host has more devices.
MAX_RANKS = 64
PLACE = "devices"
# More than any machine has. A larger value would create arrays that do not fit, or processes without end.
MAX_ENGINES_ON_HOST = 1024


class RankOptions(OptionGroup):
    """Options for the number of ranks and their parts of the model; one rank with all of it by default."""

    tensor_parallel_size: Annotated[
        int,
        Option(
            "ranks that share each layer of the model; an engine has this many GPUs, times --pipeline-parallel-size",
            Integer(1, MAX_RANKS),
            group=RANKS,
        ),
    ] = 1
    pipeline_parallel_size: Annotated[
        int,
        Option(
            "pipeline stages of the model, each with a part of its layers",
            Integer(1, MAX_RANKS),
            group=RANKS,
        ),
    ] = 1
    enable_expert_parallel: Annotated[
        bool,
        Option(
            "distribute whole experts over the ranks of a stage, instead of a part of each expert",
            Switch(),
            group=RANKS,
        ),
    ] = False

    executor: Annotated[
        str,
        Option(
            "what computes the model instead of these ranks: MODULE:NAME, or the name of an installed plug-in",
            Reader("EXECUTOR"),
            default="the engine's own ranks",
            group=RANKS,
        ),
    ] = ""

    @property
    def layout(self) -> ParallelLayout:
        """Parts of the model that each rank has."""
        return ParallelLayout(self.tensor_parallel_size, self.pipeline_parallel_size, self.enable_expert_parallel)

    @property
    def num_ranks(self) -> int:
        """Number of processes, and on GPUs of devices, of one engine."""
        return self.layout.world_size


def check_ranks(options: RankOptions, engine: str, *, async_scheduling: bool = False, **others: object) -> None:
    """Refuse options that an engine with several ranks does not support.

    Args:
        others: values of options that engines with several ranks do not support, by name.

    Raises:
        ConfigurationError: names the options and the remedy.
    """
    num_ranks = options.num_ranks
    if num_ranks > MAX_RANKS:
        raise ConfigurationError(
            f"tensor_parallel_size {options.tensor_parallel_size} times pipeline_parallel_size "
            f"{options.pipeline_parallel_size} are {num_ranks} ranks, and an engine has at most {MAX_RANKS}"
        )
    if engine != "penstock":
        if options.executor:
            raise ConfigurationError(f"executor is for Penstock's own engine, and engine is {engine!r}; leave it out")
        return  # the engine checks its options itself
    if options.enable_expert_parallel and options.tensor_parallel_size == 1:
        raise ConfigurationError(
            "enable_expert_parallel shares experts between the ranks of a stage, and there is one: raise "
            "tensor_parallel_size, or leave it out"
        )
    if options.enable_expert_parallel and options.pipeline_parallel_size > 1:
        raise ConfigurationError(
            f"enable_expert_parallel shares whole experts in one stage, and pipeline_parallel_size is "
            f"{options.pipeline_parallel_size}; leave one of them out"
        )
    if num_ranks == 1:
        return
    if async_scheduling and options.pipeline_parallel_size > 1:
        raise ConfigurationError(
            f"async_scheduling is for engines of one stage, and pipeline_parallel_size "
            f"{options.pipeline_parallel_size} schedules a batch for each stage while others are computed; leave "
            f"async_scheduling out"
        )
    for name, value in others.items():
        if not value:
            continue
        option = name if value is True else f"{name} {value!r}"
        raise ConfigurationError(
            f"{option} is for engines of one rank, and tensor_parallel_size {options.tensor_parallel_size} with "
            f"pipeline_parallel_size {options.pipeline_parallel_size} makes {num_ranks}; leave one of them out"
        )


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
