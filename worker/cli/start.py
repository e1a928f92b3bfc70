"""``worker start``: serve a model on this host until told to stop."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import re
import socket
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from ...shared.command_line import Command, UsageError, add_redis_arguments
from ...shared.embedded import resolve_redis_url
from ...shared.errors import ConfigurationError
from ...shared.keys import check_name
from ...shared.log import FORMATS, LEVELS, configure_logging
from ..config import (
    ATTENTION_BACKENDS,
    DEVICES,
    DTYPES,
    KV_CACHE_DTYPES,
    QUANTIZATIONS,
    SCHEDULING_POLICIES,
    STREAM_INTERVAL_MS,
    STRUCTURED_OUTPUTS_BACKENDS,
    EngineConfig,
    WorkerConfig,
)

_MAX_SIZE_LEN = 40
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?)b?|b)?", re.IGNORECASE)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, metavar="PATH_OR_NAME", help="model folder, or name on the hub")
    parser.add_argument("--served-model-name", default="", metavar="NAME", help="what clients call it")
    add_redis_arguments(parser)
    place = parser.add_argument_group("where (default: every GPU, else the CPU)")
    place.add_argument("--gpus", metavar="0,1", help="one engine on each of these GPUs")
    place.add_argument("--device", choices=DEVICES, help="cpu, or every GPU")
    place.add_argument("--engines", type=int, metavar="N", help="number of engines on the CPU (default: 1)")
    place.add_argument("--threads", type=int, default=0, metavar="N", help="threads of each CPU engine; 0 chooses")
    engine = parser.add_argument_group("engine")
    _add_engine_arguments(engine)
    _add_computing_arguments(engine)
    _add_control_arguments(parser.add_argument_group("control and diagnosis"))
    _add_process_arguments(parser.add_argument_group("process"))


def _add_engine_arguments(engine: argparse._ArgumentGroup) -> None:
    """What an engine takes, and how much of it at a time."""
    engine.add_argument("--max-model-len", type=int, metavar="N", help="most prompt plus output tokens of a request")
    engine.add_argument("--max-num-seqs", type=int, metavar="N", help="most requests in one batch")
    engine.add_argument("--max-num-batched-tokens", type=int, metavar="N", help="token budget of one step")
    engine.add_argument(
        "--scheduling-policy",
        choices=SCHEDULING_POLICIES,
        default="fcfs",
        help="who goes first in an engine: by arrival, or the lowest priority and then by arrival (fcfs)",
    )
    engine.add_argument("--block-size", type=int, metavar="N", help="tokens per KV-cache block")
    engine.add_argument(
        "--no-enable-prefix-caching",
        dest="enable_prefix_caching",
        action="store_false",
        help="compute every prompt anew, though it begins like one of the same tenant before it",
    )
    engine.add_argument(
        "--async-scheduling",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="schedule the next batch while one is computed (no)",
    )
    engine.add_argument(
        "--structured-outputs-backend",
        choices=STRUCTURED_OUTPUTS_BACKENDS,
        default="xgrammar",
        help="the library that holds outputs to JSON schemas and other grammars; auto: whichever can (xgrammar)",
    )
    engine.add_argument(
        "--gpu-memory-utilization", type=float, metavar="SHARE", help="share of free memory for the KV cache, 0 to 1"
    )
    engine.add_argument("--kv-cache-memory", metavar="2GiB", help="memory of the KV cache; overrides the share")
    engine.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")
    engine.add_argument(
        "--enable-prompt-embeds", action="store_true", help="take prompts that are given as embeddings, too"
    )


def _add_computing_arguments(engine: argparse._ArgumentGroup) -> None:
    """How an engine computes what it took."""
    engine.add_argument("--dtype", choices=DTYPES, default="auto", help="default: as the weights were saved")
    engine.add_argument(
        "--no-native-kernels",
        dest="native_kernels",
        action="store_false",
        help="on the CPU, compute with torch alone instead of compiling kernels for this processor at the first start",
    )
    engine.add_argument(
        "--quantization",
        choices=QUANTIZATIONS,
        help="hold the weights of linear layers in bytes: faster, for logits that differ by some percent (fp8: on a "
        "GPU)",
    )
    engine.add_argument(
        "--attention-backend",
        choices=ATTENTION_BACKENDS,
        default="auto",
        help="what computes attention: triton on a GPU, native (compiled) on the CPU, reference (torch) anywhere; "
        "refused where it cannot (auto: what is made for the device)",
    )
    engine.add_argument(
        "--kv-cache-dtype",
        choices=KV_CACHE_DTYPES,
        default="auto",
        help="hold keys and values in eight bits: twice the tokens in the same memory, for logits that differ by some "
        "percent, and on the CPU several times slower; fp8 is fp8_e4m3 (auto: as they come)",
    )
    engine.add_argument(
        "--enforce-eager",
        action="store_true",
        help="on a GPU, capture no CUDA graphs: a quicker start and less memory, for slower decodes",
    )
    engine.add_argument(
        "--deterministic",
        action="store_true",
        help="a request gets the same tokens in any company and on any equal engine that resumes it (slower)",
    )


def _add_control_arguments(control: argparse._ArgumentGroup) -> None:
    control.add_argument("--profile-dir", default="", metavar="DIR", help="for traces (default: in the data folder)")
    control.add_argument("--dump-dir", default="", metavar="DIR", help="for a file about each step that failed")
    control.add_argument("--dump-prompts", action="store_true", help="tell the token ids of its requests in there, too")
    control.add_argument(
        "--rpc-module",
        action="append",
        default=[],
        metavar="MODULE",
        help="Python module whose @rpc_method functions clients may call in the engine; may be given several times",
    )


def _add_process_arguments(process: argparse._ArgumentGroup) -> None:
    process.add_argument(
        "--drain-timeout", type=float, default=30.0, metavar="S", help="time for running requests at shutdown (30)"
    )
    process.add_argument(
        "--max-deliveries", type=int, default=3, metavar="N", help="park a request that N engines died on (3)"
    )
    process.add_argument(
        "--stall-timeout",
        type=float,
        default=10.0,
        metavar="S",
        help="kill and restart an engine that makes no step, or a process that says nothing, for so long (10)",
    )
    process.add_argument(
        "--lease-ttl", type=float, default=3.0, metavar="S", help="an engine unheard of for so long counts as dead (3)"
    )
    process.add_argument(
        "--stream-interval-ms",
        type=float,
        default=STREAM_INTERVAL_MS,
        metavar="MS",
        help="under load, the longest that output waits for more of its request, to be sent with it; 0: never (50)",
    )
    process.add_argument(
        "--fork-server",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="start engine cores by forking a process that has imported torch: a dead one is replaced seconds sooner, "
        "and several share memory (yes on the CPU, no on GPUs)",
    )
    process.add_argument("--log-level", choices=LEVELS, default="info")
    process.add_argument(
        "--log-requests",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="a line at the end of each request, at level info (yes)",
    )
    process.add_argument("--log-format", choices=FORMATS, default="auto", help="auto: pretty on a terminal, else JSON")


def _run(arguments: argparse.Namespace) -> int:
    configure_logging(arguments.log_level, arguments.log_format)
    _check_installed()
    # Imported late: it needs psutil, and `worker --help` should say so rather than fail.
    from ..supervisor import EngineStartError, Supervisor, place_engines
    from ..supervisor.fork_server import FORK_SERVER_VARIABLE, running_fork_server

    placements = place_engines(arguments.gpus, arguments.device, arguments.engines)
    engine = _engine_config(arguments, placements[0].device, len(placements))
    check_name("the model's name (--served-model-name)", engine.model_name)
    where = ", ".join(dict.fromkeys(map(str, placements)))
    count = f"{len(placements)} engine{'s' if len(placements) > 1 else ''}"

    def announce() -> None:
        print(f"ready: model {engine.model_name} on {count}, {where}{_chosen(engine)}", flush=True)

    worker_id = f"{socket.gethostname()}-{os.getpid()}"
    log_options = ("--log-level", arguments.log_level, "--log-format", arguments.log_format)
    forking: AbstractContextManager[str] = nullcontext("")
    if arguments.fork_server or (arguments.fork_server is None and engine.device == "cpu"):
        # Somebody may keep one for all: the tests do, whose workers are many and short-lived.
        preloaded = ("--model", engine.model) if Path(engine.model).is_dir() else ()
        others = os.environ.get(FORK_SERVER_VARIABLE)
        forking = nullcontext(others) if others else running_fork_server((*log_options, *preloaded))
    with resolve_redis_url(arguments.redis_url) as redis_url, forking as fork_server:
        configs = [
            WorkerConfig(
                worker_id=worker_id,
                engine_id=f"{worker_id}-{index}",
                redis_url=redis_url,
                engine=engine,
                namespace=arguments.namespace,
                visible_devices=placement.visible_devices,
                supervisor_pid=os.getpid(),
                drain_timeout_s=arguments.drain_timeout,
                lease_ttl_s=arguments.lease_ttl,
                max_deliveries=arguments.max_deliveries,
                stall_timeout_s=arguments.stall_timeout,
                log_level=arguments.log_level,
                log_format=arguments.log_format,
                log_requests=arguments.log_requests,
                stream_interval_ms=arguments.stream_interval_ms,
                fork_server=fork_server,
            )
            for index, placement in enumerate(placements)
        ]
        try:
            left_in_order = asyncio.run(Supervisor(configs, announce).run())
        except EngineStartError as error:
            sys.stderr.write(error.trace)
            raise
    return 0 if left_in_order else 1


def _chosen(engine: EngineConfig) -> str:
    """What was chosen otherwise than by default, of what changes speed and rounding, for the line that says ready."""
    options = {
        "attention": engine.attention_backend if engine.attention_backend != "auto" else None,
        "KV cache in": engine.eight_bit_cache,
        "weights in": engine.quantization,
    }
    return "".join(f", {name} {value}" for name, value in options.items() if value is not None)


def _engine_config(arguments: argparse.Namespace, device: str, num_engines: int) -> EngineConfig:
    """Build the engine's configuration; what was not given keeps the default of ``EngineConfig``."""
    given = {
        name: value
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "gpu_memory_utilization")
        if (value := getattr(arguments, name)) is not None
    }
    if arguments.kv_cache_memory is not None:
        given["kv_cache_memory"] = parse_bytes("--kv-cache-memory", arguments.kv_cache_memory)
    # A folder keeps its name in the engine's messages, and does not depend on the working directory.
    model = os.path.abspath(arguments.model) if Path(arguments.model).is_dir() else arguments.model
    return EngineConfig(
        model=model,
        served_model_name=arguments.served_model_name,
        device=device,
        dtype=arguments.dtype,
        scheduling_policy=arguments.scheduling_policy,
        enable_prefix_caching=arguments.enable_prefix_caching,
        structured_outputs_backend=arguments.structured_outputs_backend,
        num_threads=arguments.threads,
        num_engines_on_host=num_engines,
        trust_remote_code=arguments.trust_remote_code,
        deterministic=arguments.deterministic,
        profile_dir=_absolute(arguments.profile_dir),
        dump_dir=_absolute(arguments.dump_dir),
        dump_prompts=arguments.dump_prompts,
        rpc_modules=tuple(arguments.rpc_module),
        enable_prompt_embeds=arguments.enable_prompt_embeds,
        native_kernels=arguments.native_kernels,
        quantization=arguments.quantization,
        async_scheduling=arguments.async_scheduling,
        enforce_eager=arguments.enforce_eager,
        attention_backend=arguments.attention_backend,
        kv_cache_dtype=arguments.kv_cache_dtype,
        **given,
    )


def _absolute(folder: str) -> str:
    """A folder that does not depend on the working directory; none stays none."""
    return os.path.abspath(folder) if folder else ""


def parse_bytes(option: str, text: str) -> int:
    """Read a size such as "2GiB", "512M" (binary, as memory is) or "1.5GB" (decimal when written so).

    Raises:
        UsageError: it is not a positive size.
    """
    found = _BYTES.fullmatch(text.strip())
    if not found or len(text) > _MAX_SIZE_LEN:
        raise UsageError(f"{option} must be a size such as 2GiB or 512MiB, got {text[:_MAX_SIZE_LEN]!r}")
    number, prefix, binary = found[1], (found[2] or "").lower(), found[3]
    decimal = bool(prefix) and not binary and text.strip().lower().endswith("b")
    size = int(float(number) * (1000 if decimal else 1024) ** " kmgt".index(prefix or " "))
    if size < 1:
        raise UsageError(f"{option} must be positive, got {text!r}")
    return size


def _check_installed() -> None:
    missing = [name for name in ("torch", "transformers", "psutil") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigurationError(
            f"worker start needs {', '.join(missing)}, which a plain client does without; "
            "pip install 'penstock[worker]'"
        )


COMMAND = Command("start", "Serve a model on this host.", run=_run, add_arguments=_add_arguments)
