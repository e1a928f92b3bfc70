"""``penstock chaos``: kill everything at random while requests run, and check that none is harmed."""

from __future__ import annotations

import argparse
import random
from pathlib import Path

from ....shared.partitions import MAX_PARTITIONS
from ....shared.process.command_line import Command, UsageError
from .options import DEMO, ChaosOptions


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=1000, help="different requests (default 1000)")
    parser.add_argument("--seconds", type=float, default=0.0, help="go on for at least so long, repeating requests")
    parser.add_argument("--events", type=int, default=0, help="go on until at least so many things have happened")
    parser.add_argument("--engines", type=int, help="`worker start` this many times (default 3; 1 with --models)")
    parser.add_argument("--concurrency", type=int, default=24, help="requests at once (default 24)")
    parser.add_argument("--interval", type=float, default=2.5, help="mean seconds between two events (default 2.5)")
    ranks_help = "mean tokens of all requests between two events, in place of seconds: as many events on any machine"
    parser.add_argument("--interval-tokens", type=int, default=0, metavar="N", help=ranks_help)
    parser.add_argument("--seed", type=int, help="of requests and events (default: random, printed)")
    parser.add_argument("--sentinel", action="store_true", help="a primary with replicas and Sentinels; it is killed")
    parser.add_argument(
        "--lose-data",
        action="store_true",
        help="Redis loses its data now and then; requests may end with the error that says so, and in no other way",
    )
    parser.add_argument(
        "--shards", type=int, default=0, help="so many more servers, a model on each; they are killed, and models move"
    )
    models_help = "so many demo models, or these (demo, a folder, a .gguf file), share a device with memory for one"
    parser.add_argument("--models", nargs="+", default=["1"], metavar="MODEL", help=models_help)
    parser.add_argument("--device-memory", default="", metavar="SIZE", help="for all of --models MODEL MODEL …")
    swaps_help = "go on undisturbed until at least so many swaps have happened, to compare memory"
    parser.add_argument("--swaps", type=int, default=0, metavar="N", help=swaps_help)
    parser.add_argument("--partitions", type=int, default=1, help="of each model (default 1); they move, too")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of the model's weights (default float32, in which it was trained)",
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="of all engines; cuda is the first GPU, which they share (default cpu)",
    )
    parser.add_argument(
        "--engine",
        choices=("penstock", "vllm"),
        default="penstock",
        help="what computes; with vllm the tokens of greedy requests alone are compared (default penstock)",
    )
    parser.add_argument("--engine-python", default="", metavar="FILE", help="the Python that has vLLM and penstock")
    parser.add_argument(
        "--speculative", default="off", metavar="{off,ngram[:N],suffix[:N]}", help="as of `worker start` (default off)"
    )
    ranks_help = "ranks of each engine, which are killed, too; as of `worker start` (default 1)"
    parser.add_argument("--tensor-parallel-size", type=int, default=1, metavar="N", help=ranks_help)
    ranks_help = "as above; of several stages, which have batches in flight, greedy requests are compared (default 1)"
    parser.add_argument("--pipeline-parallel-size", type=int, default=1, metavar="N", help=ranks_help)
    parser.add_argument("--json", default="", help="where the report goes as JSON")
    parser.add_argument("--log", default="", help="where the workers' logs go")


def _run_chaos_command(arguments: argparse.Namespace) -> int:
    from .run import run_chaos  # rich and psutil are not for every `penstock` command

    num_models = _read_models(arguments)
    if arguments.engines is None:
        arguments.engines = 3 if num_models == 1 else 1
    if arguments.shards and arguments.sentinel:
        raise UsageError("--shards has private servers of its own; leave --sentinel out")
    if num_models == 1 and arguments.shards > arguments.engines:
        raise UsageError(f"--engines must be at least --shards ({arguments.shards}): each has a model to be served")
    if arguments.partitions > 1 and arguments.lose_data:
        raise UsageError("a home that loses its data forgets --partitions; leave --lose-data out")
    if arguments.engine != "penstock" and (arguments.tensor_parallel_size, arguments.pipeline_parallel_size) != (1, 1):
        raise UsageError(f"ranks of engine {arguments.engine} are its own; leave --tensor-parallel-size out")
    if arguments.device == "cuda" and arguments.tensor_parallel_size * arguments.pipeline_parallel_size > 1:
        raise UsageError("--device cuda is one GPU for all engines, and ranks want one each; leave one of them out")
    if arguments.interval_tokens < 0:
        raise UsageError(f"--interval-tokens must be at least 1, or 0 for none, got {arguments.interval_tokens}")
    if not 1 <= arguments.partitions <= MAX_PARTITIONS:
        raise UsageError(f"--partitions must be in [1, {MAX_PARTITIONS}], got {arguments.partitions}")
    options = ChaosOptions(
        num_requests=arguments.requests,
        min_seconds=arguments.seconds,
        min_events=arguments.events,
        num_engines=arguments.engines,
        concurrency=arguments.concurrency,
        interval_s=arguments.interval,
        interval_tokens=arguments.interval_tokens,
        seed=random.randrange(1 << 31) if arguments.seed is None else arguments.seed,
        json_path=arguments.json,
        log_path=arguments.log,
        has_sentinels=arguments.sentinel,
        loses_data=arguments.lose_data,
        num_shards=arguments.shards,
        num_partitions=arguments.partitions,
        num_models=num_models,
        models=arguments.models if len(arguments.models) > 1 else [],
        device_memory=arguments.device_memory,
        min_swaps=arguments.swaps,
        dtype=arguments.dtype,
        device=arguments.device,
        engine=arguments.engine,
        engine_python=arguments.engine_python,
        speculative=arguments.speculative,
        tensor_parallel_size=arguments.tensor_parallel_size,
        pipeline_parallel_size=arguments.pipeline_parallel_size,
    )
    return run_chaos(options)


def _read_models(arguments: argparse.Namespace) -> int:
    """Return the number of models, after checking the options that concern them."""
    words: list[str] = arguments.models
    num_models = len(words) if len(words) > 1 else int(words[0]) if words[0].isdecimal() else 0
    if num_models < 1 or (arguments.swaps and num_models == 1):
        raise UsageError(
            f"--models must be a number from 1 on, above 1 with --swaps, or several models, got {' '.join(words)}"
        )
    for word in words if len(words) > 1 else ():
        if word != DEMO and not Path(word).exists():
            raise UsageError(f"--models {word} is neither {DEMO} nor a file or folder")
    if len(set(words)) < len(words):
        raise UsageError(f"--models must be different ones, got {' '.join(words)}")
    if (len(words) > 1) != bool(arguments.device_memory):
        raise UsageError("--models MODEL MODEL … and --device-memory SIZE need each other; give both or neither")
    if num_models > 1 and arguments.sentinel:
        raise UsageError("--models share devices at a private Redis; leave --sentinel out")
    if num_models > 1 and (arguments.device, arguments.engine) != ("cpu", "penstock"):
        raise UsageError("--models has a budget for Penstock's engine on the CPU; leave --device and --engine out")
    return num_models


COMMAND = Command(
    "chaos", "Kill processes at random under load; check that no request is harmed.", _run_chaos_command, _add_arguments
)
