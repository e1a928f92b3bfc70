"""``penstock run``: a private Redis, a worker and a chat in one command, for the first minutes with a model."""

from __future__ import annotations

import argparse
import shlex
import sys

from ....shared.process.command_line import Command
from ...local.stack import LocalStack
from .chat import add_chat_arguments, chat_on


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="MODEL", help="GGUF file, folder or hub name")
    add_chat_arguments(parser)
    parser.add_argument(
        "--worker-options",
        default="",
        metavar="WORDS",
        help="options of `worker start`, as one argument: '--quantization int8 --max-model-len 4096'",
    )
    parser.set_defaults(model=None)


def _run(arguments: argparse.Namespace) -> int:
    print(f"loading {arguments.path} …", file=sys.stderr, flush=True)
    with LocalStack(arguments.path, shlex.split(arguments.worker_options)) as stack:
        print(f"ready in {stack.ready_time_s:.1f} s", file=sys.stderr, flush=True)
        return chat_on(stack.url, arguments)


COMMAND = Command(
    "run", "Load a model and chat with it: a private Redis, a worker and `chat` in one.", _run, _add_arguments
)
