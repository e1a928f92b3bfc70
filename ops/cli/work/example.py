"""``penstock example``: print an example app, to be copied into a file."""

from __future__ import annotations

import argparse
from importlib.resources import files

from ....shared.process.command_line import Command, UsageError
from ....shared.values.names import did_you_mean

# Files of ``ops/examples`` with their descriptions, by name.
EXAMPLES = {
    "first": ("first_app.py", "FastAPI: stream an answer, and refuse properly"),
    "fastapi": ("fastapi_app.py", "FastAPI: streams that resume after a lost connection, background answers, a page"),
    "page": ("page.html", "the page of the app for FastAPI"),
    "starlette": ("starlette_app.py", "the same routes for Starlette"),
    "django": ("django_app.py", "the same routes for Django, under ASGI"),
    "flask": ("flask_app.py", "the same routes for Flask, under WSGI"),
    "webhooks": ("webhook_receiver.py", "Starlette: a receiver of webhooks"),
}


def _add_example_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="example to print; without it they are listed")


def _print_example(arguments: argparse.Namespace) -> int:
    if arguments.name is None:
        for name, (_, description) in EXAMPLES.items():
            print(f"{name:<11}{description}")
        return 0
    if arguments.name not in EXAMPLES:
        hint = did_you_mean(arguments.name, EXAMPLES) or f"there are {', '.join(EXAMPLES)}"
        raise UsageError(f"no example is called {arguments.name}; {hint}")
    file, _ = EXAMPLES[arguments.name]
    print(files("penstock.ops.examples").joinpath(file).read_text(), end="")
    return 0


COMMAND = Command(
    "example", "Print an example app: penstock example fastapi > app.py", _print_example, _add_example_arguments
)
