"""Options for the devices of an engine, and for ranks that compute one model on several devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from ...shared.errors import ConfigurationError
from ...shared.process.secret_files import variable_or_file
from ..models.parallel.layout import ParallelLayout
from ..options.numbers import Integer
from ..options.option import Option, OptionGroup
from ..options.readers import Choice, Reader, Switch

RANKS = "ranks: several devices per engine"
# No host has more devices.
MAX_RANKS = 64
PLACE = "devices"
KEY_VARIABLE = "PENSTOCK_NODE_KEY"
_MIN_KEY_CHARS = 16
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

    nnodes: Annotated[
        int,
        Option("hosts that one engine spans, each with as many ranks", Integer(1, MAX_RANKS), group=RANKS),
    ] = 1
    node_rank: Annotated[
        int,
        Option(
            "number of this host; host 0 has the engine, the others run ranks for it",
            Integer(0, MAX_RANKS - 1),
            group=RANKS,
        ),
    ] = 0
    master_addr: Annotated[
        str,
        Option("address of host 0 for the others; required with --nnodes", Reader("HOST"), default="none", group=RANKS),
    ] = ""
    master_port: Annotated[
        int, Option("port at which host 0 waits for the others", Integer(1, 65_535), group=RANKS)
    ] = 29501

    @property
    def layout(self) -> ParallelLayout:
        """Parts of the model that each rank has."""
        return ParallelLayout(self.tensor_parallel_size, self.pipeline_parallel_size, self.enable_expert_parallel)

    @property
    def num_ranks(self) -> int:
        """Number of processes, and on GPUs of devices, of one engine on all its hosts."""
        return self.layout.world_size

    @property
    def num_ranks_on_host(self) -> int:
        """Number of ranks of one engine on each of its hosts."""
        return self.num_ranks // self.nnodes


def check_ranks(options: RankOptions, engine: str, *, async_scheduling: bool = False, **others: object) -> None:
    """Refuse options that an engine with several ranks does not support.

    Args:
        others: values of options that engines over several hosts do not support, by name.

    Raises:
        ConfigurationError: names the options and the remedy.
    """
    num_ranks = options.num_ranks
    if num_ranks > MAX_RANKS:
        raise ConfigurationError(
            f"tensor_parallel_size {options.tensor_parallel_size} times pipeline_parallel_size "
            f"{options.pipeline_parallel_size} are {num_ranks} ranks, and an engine has at most {MAX_RANKS}"
        )
    _check_hosts(options, engine)
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
        if value and options.nnodes > 1:
            raise ConfigurationError(
                f"{name} {value!r} is for engines of one host, whose ranks share memory, and nnodes is "
                f"{options.nnodes}; leave one of them out"
            )


def _check_hosts(options: RankOptions, engine: str) -> None:
    """Raise ``ConfigurationError`` if the options of several hosts do not fit each other or the ranks."""
    if options.nnodes == 1:
        for name, value in (("node_rank", options.node_rank), ("master_addr", options.master_addr)):
            if value:
                raise ConfigurationError(f"{name} {value} is for an engine over several hosts; set nnodes, too")
        return
    for name, is_set in ((f"engine {engine!r}", engine != "penstock"), ("executor", options.executor)):
        if is_set:
            raise ConfigurationError(
                f"nnodes {options.nnodes} is for Penstock's own ranks, not for {name}; leave one out"
            )
    if options.num_ranks % options.nnodes:
        raise ConfigurationError(
            f"nnodes is {options.nnodes}, which does not divide the {options.num_ranks} ranks of tensor_parallel_size "
            f"{options.tensor_parallel_size} and pipeline_parallel_size {options.pipeline_parallel_size}"
        )
    if options.node_rank >= options.nnodes:
        raise ConfigurationError(
            f"node_rank is {options.node_rank} and nnodes {options.nnodes}; the hosts are numbered from 0 to "
            f"{options.nnodes - 1}"
        )
    if not options.master_addr:
        raise ConfigurationError("nnodes needs master_addr: the address of host 0 at which the others reach it")


def read_node_key(environment: Mapping[str, str] | None = None) -> bytes:
    """Return the secret by which the hosts of an engine know each other; from the environment, so that no log shows it.

    Raises:
        ConfigurationError: it is missing or short.
    """
    key = variable_or_file(KEY_VARIABLE, environment)
    if len(key) < _MIN_KEY_CHARS:
        raise ConfigurationError(
            f"nnodes needs {KEY_VARIABLE} in the environment of all hosts: the same secret of at least "
            f"{_MIN_KEY_CHARS} characters, as of openssl rand -hex 32; or {KEY_VARIABLE}_FILE, which names its file"
        )
    return key.encode()


class PlaceOptions(OptionGroup):
    """Options for the device and the share of the host.

    Args:
        num_engines_on_host: number of engines that share the host's memory and cores.
        defers_cache: the KV cache is allocated when it is first woken up, because another process has one until then.
    """

    device: Annotated[str, Option("cpu, or cuda: one visible GPU per rank", Choice("cpu", "cuda"), group=PLACE)] = "cpu"
    num_threads: Annotated[
        int,
        Option("threads of each CPU engine; 0 chooses", Integer(0, 1024, "0 chooses"), name="threads", group=PLACE),
    ] = 0
    num_engines_on_host: Annotated[int, Integer(1, MAX_ENGINES_ON_HOST)] = 1
    defers_cache: bool = False
