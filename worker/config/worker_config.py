"""The configuration of one worker process, including that of its engine."""

from __future__ import annotations

from typing import Annotated

import msgspec

from ...shared.errors import ConfigurationError
from ...shared.params.answer_formats import REASONING_FORMATS
from ...shared.params.chat import AUTO, NONE
from ...shared.process.command_line import NAMESPACE_HELP, TRACES_HELP
from ...shared.process.log import FORMATS, LEVELS
from ...shared.values.names import DEFAULT_NAMESPACE
from ...shared.values.shown import MaskedRepr
from ..options.numbers import Integer, Number, Seconds
from ..options.option import Option, check_fields
from ..options.readers import Choice, Folder, Name, Reader, Switch
from .engine_config import EngineConfig
from .model import MODEL

# How often a worker process reports its status to the supervisor, so that a missing report shows a fault.
STATUS_INTERVAL_S = 1.0
# Readers regard a stream that is silent for longer as hanging.
MAX_STREAM_INTERVAL_MS = 10_000

# Headings of the help.
BROKER, PROCESS, OBSERVING, LOG = "Redis", "processes", "metrics", "log"


class WorkerConfig(MaskedRepr, msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Configuration of a worker process; the supervisor writes it as the first line of its standard input.

    Args:
        worker_id: id of the supervisor, shared by its engines.
        engine_id: id of this engine: consumer name in Redis and key of its heartbeat. No other process ever has it, not
            even the next worker of the same name, so that claims under it belong to this process.
        engine_name: name of the engine in metrics; the same after a restart of its worker.
        redis_url: URL of the broker; it may contain a password, so it is not on the command line.
        shards: servers that hold the models, as ``parse_shards`` reads them; empty if ``redis_url`` holds them.
        visible_devices: value of CUDA_VISIBLE_DEVICES for the core; None to inherit it.
        num_restarts: number of restarts of this engine.
        starts_asleep: level at which the engine sleeps, without a core, until it is woken up; 0 to load the model.
        is_shared: whether its device has several models, so that the supervisor decides when the engine wakes.
        fork_server: socket of the process that forks engine cores. That for worker processes is next to it
            (``workers_address``). Empty to start both as new processes.
        weights_keeper: socket of the process that holds the weights and forks cores that share them; empty without one.
        standby_number: number of this process if it is started as a standby, and 0 if it serves at once.
    """

    worker_id: str
    engine_id: str
    redis_url: str
    engine: EngineConfig
    namespace: Annotated[str, Option(NAMESPACE_HELP, Reader("NAME"), group=BROKER)] = DEFAULT_NAMESPACE
    shards: str = ""
    visible_devices: str | None = None
    supervisor_pid: int = 0
    drain_timeout_s: Annotated[
        float,
        Option(
            "time for running requests at shutdown, before they return to the queue",
            Seconds(0, "0 hands running requests back at once"),
            name="drain_timeout",
            group=PROCESS,
        ),
    ] = 30.0
    heartbeat_interval_s: float = 1.0
    heartbeat_ttl_s: float = 3.0
    # A TTL shorter than the interval of heartbeats would declare running engines dead.
    lease_ttl_s: Annotated[
        float,
        Option(
            "time without a lease renewal after which an engine counts as dead",
            Seconds(0.1),
            name="lease_ttl",
            group=PROCESS,
        ),
    ] = 3.0
    max_deliveries: Annotated[
        int,
        Option(
            "deaths of engines after which the request that they ran is parked", Integer(1, 1_000_000), group=PROCESS
        ),
    ] = 3
    stall_timeout_s: Annotated[
        float,
        Option(
            "time without a step, or without a report of a process, after which an engine is killed and restarted",
            Seconds(0.1),
            name="stall_timeout",
            group=PROCESS,
        ),
    ] = 10.0
    load_timeout_s: Annotated[
        float,
        Option(
            "time without progress after which a loading engine is killed and restarted; 0: never",
            Seconds(0, "0 waits for ever"),
            name="load_timeout",
            group=PROCESS,
        ),
    ] = 900.0
    num_restarts: int = 0
    log_level: Annotated[str, Option("lowest level that is logged", Choice(*LEVELS), group=LOG)] = "info"
    log_format: Annotated[
        str, Option("format of the log; auto: pretty on a terminal, otherwise JSON", Choice(*FORMATS), group=LOG)
    ] = "auto"
    stream_interval_ms: Annotated[
        float,
        Option(
            "under load, longest delay of output, to send it with later tokens of its request; up to half a "
            "second while Redis is busy; 0: none",
            Number(0, MAX_STREAM_INTERVAL_MS, "0 turns it off", metavar="MS"),
            group=PROCESS,
        ),
    ] = 50.0
    fork_server: str = ""
    engine_name: str = ""
    log_requests: Annotated[
        bool, Option("log a line at the end of each request, with its parameters and measurements", Switch(), group=LOG)
    ] = True
    log_prompts: Annotated[
        bool,
        Option("log the token ids of each prompt, too; without it no content is logged", Switch(), group=LOG),
    ] = False
    step_log: Annotated[
        str,
        Option("folder for a file of each engine's steps, which `penstock sim fit` reads", Folder(), group=LOG),
    ] = ""
    otlp_traces_endpoint: Annotated[str | None, Option(TRACES_HELP, Reader("URL"), default="no spans", group=LOG)] = (
        None
    )
    reasoning_parser: Annotated[
        str,
        Option(
            "format of the model's reasoning, after which grammars begin; auto: detected from its chat template; "
            "none: grammars apply from the first token",
            Choice(AUTO, NONE, *REASONING_FORMATS),
            group=MODEL,
        ),
    ] = AUTO
    weights_version: Annotated[
        str | None,
        Option(
            "version of the weights, shown in heartbeats and answers until other weights are loaded",
            Name(),
            default="a digest of the weights",
            group=MODEL,
        ),
    ] = None
    starts_asleep: int = 0
    is_shared: bool = False
    standby: Annotated[
        bool,
        Option(
            "keep a second process of each engine ready to serve after a death; on the CPU both share the weights, a "
            "GPU holds them twice",
            Switch(),
            group=PROCESS,
        ),
    ] = False
    weights_keeper: str = ""
    standby_number: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.standby:
            _check_standby(self.engine)

    @property
    def process_id(self) -> str:
        """Id of the process for fork servers, which end the former process of an id. A standby has its own."""
        return f"{self.engine_id}~{self.standby_number}" if self.standby_number else self.engine_id

    @property
    def lease_ttl_ms(self) -> int:
        """``lease_ttl_s`` in milliseconds, the broker's unit."""
        return int(self.lease_ttl_s * 1000)

    @property
    def device_name(self) -> str:
        """Name of the engine's device, for people: "cpu" or "cuda:0"."""
        return self.engine.device if self.visible_devices is None else f"cuda:{self.visible_devices}"


def _check_standby(engine: EngineConfig) -> None:
    """Refuse an engine that cannot have a second process.

    Raises:
        ConfigurationError: names the option that does not fit.
    """
    reasons = {
        f"engine is {engine.engine!r}": engine.engine != "penstock",
        f"the engine has {engine.num_ranks} ranks": engine.num_ranks > 1,
        "the engine is a rank of a data-parallel group": engine.is_grouped,
    }
    for reason in (reason for reason, is_so in reasons.items() if is_so):
        raise ConfigurationError(
            f"standby is a second process of an engine of one rank, but {reason}; leave --standby out"
        )
    if engine.device == "cuda" and engine.kv_cache_memory is None:
        raise ConfigurationError(
            "standby on a GPU needs kv_cache_memory: the KV cache that one process has after the other, beside two "
            "copies of the weights"
        )
