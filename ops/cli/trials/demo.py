"""``penstock demo``: the whole system on this machine, with checked answers."""

from __future__ import annotations

import argparse

from ....shared.process.command_line import Command


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--questions", type=int, default=64, help="how many questions to ask (default 64)")
    parser.add_argument("--concurrency", type=int, default=12, help="concurrent requests (default 12)")
    parser.add_argument("--seed", type=int, default=0, help="chooses the questions (default 0)")
    parser.add_argument(
        "--dashboard", action="store_true", help="send requests and serve the operators' pages until Ctrl-C"
    )
    parser.add_argument("--port", type=int, default=8090, help="port of the pages; 0 for a free one (8090)")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of the model's weights (default float32, in which it was trained)",
    )
    parser.add_argument("--redis-url", help="use a running deployment of the demo model instead of starting one")


def _run(arguments: argparse.Namespace) -> int:
    if arguments.dashboard:
        from ...demo.busy import run_busy

        return run_busy(arguments.port)
    from ...demo.run import run_demo  # only this command needs rich and psutil

    return run_demo(arguments.questions, arguments.concurrency, arguments.seed, arguments.dtype, arguments.redis_url)


COMMAND = Command("demo", "Start everything, ask questions, check the answers, stop.", _run, _add_arguments)
