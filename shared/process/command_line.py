"""The frame of our programs: subcommands as values, errors as one sentence, tables as text, and the standard streams.

A subcommand is one small module that ends in a ``Command``; a program is a tuple of them. A standard stream may be
closed, or its reader may have left: a service goes on without it.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import select
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from redis.exceptions import RedisError

from ..errors import PenstockError
from ..values.distribution import full_version
from ..values.names import DEFAULT_NAMESPACE, did_you_mean
from ..values.shown import mask_text
from .encoding import SHOWABLE
from .log import configure_logging

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130
REDIS_URL_HELP = "redis://, rediss://, unix:// or redis+sentinel:// URL"
SHARDS_HELP = "Redis servers for the models, if they are not at home: NAME=URL,URL,..."
TRACES_HELP = "OTLP over HTTP endpoint for the spans of requests: http://HOST:4318/v1/traces"
NAMESPACE_HELP = "prefix of all keys, to keep deployments apart"
NAMESPACE_VARIABLE = "PENSTOCK_NAMESPACE"
_OPTION = re.compile(r"--?[a-zA-Z][\w-]*")


class UsageError(PenstockError):
    """The command was called with arguments that contradict each other or this machine; exit status 2."""

    code = "usage_error"


def _no_arguments(_: argparse.ArgumentParser) -> None:
    """Add no arguments."""


@dataclass(frozen=True)
class Command:
    """A subcommand.

    Args:
        summary: one line, for the list of commands.
        run: takes the parsed arguments and returns the exit status; raises ``PenstockError`` to end with a sentence.
        subcommands: if there are some, the command is a group and has no ``run`` of its own.
        forwards_arguments: everything after the name is left unparsed in ``arguments.rest``.
    """

    name: str
    summary: str
    run: Callable[[argparse.Namespace], int] | None = None
    add_arguments: Callable[[argparse.ArgumentParser], None] = _no_arguments
    subcommands: tuple[Command, ...] = ()
    forwards_arguments: bool = False


class _ShowVersion(argparse.Action):
    """The option ``--version``; only it looks for the commit."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        parser._print_message(f"{parser.prog} {full_version()}\n", sys.stdout)
        parser.exit()


def run_program(name: str, summary: str, commands: Sequence[Command], argv: Sequence[str] | None) -> int:
    """Parse ``argv`` (the process's arguments when None), run the command, and return the exit status.

    0 is success, 1 a failure with one sentence on standard error, 2 a wrong call, 130 Ctrl-C.
    """
    open_closed_streams()
    parser = Parser(prog=name, description=summary)
    parser.add_argument("--version", action=_ShowVersion, nargs=0, help="show version and commit, and exit")
    _add_commands(parser, commands)
    arguments = parser.parse_args(argv)
    return run_reporting_errors(lambda: arguments.run(arguments))


def run_reporting_errors(run: Callable[[], int]) -> int:
    """Call ``run`` and return its exit status. Errors become one sentence and a status as in ``run_program``."""
    open_closed_streams()
    configure_logging("warning")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A name that the terminal cannot encode hides no other line.
            stream.reconfigure(errors=SHOWABLE)
    try:
        status = run()
        sys.stdout.flush()
    except UsageError as error:
        return _fail(error, EXIT_USAGE)
    except (PenstockError, RedisError) as error:
        return _fail(error, EXIT_FAILED)
    except BrokenPipeError:
        if not is_output_unread():
            raise
        # The reader of the output has left, as `head` does. Python would complain again at exit.
        discard_output()
        return EXIT_FAILED
    except OSError:
        if (reason := output_error()) is None:
            raise
        discard_output()
        return _fail(PenstockError(f"standard output cannot be written: {reason}"), EXIT_FAILED)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return status


def add_redis_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the two arguments that say which deployment a command works on."""
    parser.add_argument(
        "--redis-url",
        metavar="URL",
        help=f"{REDIS_URL_HELP}; default: PENSTOCK_REDIS_URL, or its _FILE, else a private embedded Redis",
    )
    parser.add_argument(
        "--shards",
        metavar="URLS",
        help=f"{SHARDS_HELP} (default: PENSTOCK_SHARDS, or its _FILE, else none)",
    )
    parser.add_argument(
        "--namespace",
        default=os.environ.get(NAMESPACE_VARIABLE) or DEFAULT_NAMESPACE,
        help=f"{NAMESPACE_HELP} (default: {NAMESPACE_VARIABLE}, else {DEFAULT_NAMESPACE})",
    )


def add_tracing_argument(parser: argparse.ArgumentParser) -> None:
    """Add the argument that says where spans of requests are sent."""
    parser.add_argument("--otlp-traces-endpoint", metavar="URL", help=TRACES_HELP)


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return ``rows`` under ``header`` in aligned columns, never cut: the output may go into a pipe."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


class Parser(argparse.ArgumentParser):
    """Reports a wrong call in one sentence instead of the whole usage, and an unknown option before all else.

    argparse itself checks for missing arguments first: it would ask for the ``--model`` that was misspelt.
    """

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"error: {mask_text(message)} (see {self.prog} --help)\n")

    def parse_known_args(  # type: ignore[override]  # typeshed has overloads by the type of the namespace
        self, args: Any = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        words = list(sys.argv[1:] if args is None else args)
        unknown = self._unknown_option(words)
        if unknown is not None:
            options = [option for option in self._option_string_actions if option.startswith("--")]
            hint = did_you_mean(unknown, options)
            if not hint and self._subparsers:
                hint = "the options of a command come after its name"
            self.error(f"unknown option {unknown}{hint and f'; {hint}'}")
        return super().parse_known_args(words, namespace)

    def _unknown_option(self, words: list[str]) -> str | None:
        """Return the first word that is spelt like an option of this parser but is none."""
        wants_value = False
        for word in words:
            if word in ("--", "-h", "--help") or (self._subparsers and not word.startswith("-")):
                return None  # the rest is a value, the command's, or unimportant
            option = word.partition("=")[0]
            action = self._option_string_actions.get(option)
            # A missing value is left to argparse, which reports it.
            if action is None and not wants_value and self._is_unknown(word, option):
                return option
            wants_value = action is not None and action.nargs is None and "=" not in word
        return None

    def _is_unknown(self, word: str, option: str) -> bool:
        is_spelt_so = _OPTION.fullmatch(option) is not None and " " not in word
        # An abbreviation is known, and an ambiguous one is argparse's to tell.
        is_begun = any(known.startswith(option) for known in self._option_string_actions)
        return is_spelt_so and "-" in self.prefix_chars and not is_begun


def _add_commands(parser: argparse.ArgumentParser, commands: Sequence[Command]) -> None:
    children = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in commands:
        # Without a prefix character nothing is an option, so that "--help" is forwarded, too.
        options = {"prefix_chars": "\0", "add_help": False} if command.forwards_arguments else {}
        child = children.add_parser(command.name, help=command.summary, description=command.summary, **options)
        if command.forwards_arguments:
            child.add_argument("rest", nargs=argparse.REMAINDER)
        command.add_arguments(child)
        if command.subcommands:
            _add_commands(child, command.subcommands)
        else:
            child.set_defaults(run=command.run)


def _fail(error: Exception, status: int) -> int:
    """Write the error in the last line, after all logs; the rest of a long message precedes it."""
    with suppress(OSError):
        sys.stdout.flush()
    sentence, *rest = mask_text(str(error)).strip().splitlines() or [type(error).__name__]
    with suppress(OSError):  # nobody reads it
        sys.stderr.write("".join(f"{line}\n" for line in (*rest, f"error: {sentence}")))
    return status


def open_closed_streams() -> None:
    """Put the null device in the place of closed standard streams.

    Python has None for them. Without this the next socket gets the free number, and whatever a child or a library
    writes to standard error goes there.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)
    # Should a library have opened a file under the number before, it is not written to.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            null_stream = Path(os.devnull).open(mode)  # noqa: SIM115  # open until the process ends
            setattr(sys, name, null_stream)


def print_if_read(line: str) -> None:
    """Print a line of a service, which goes on if the reader of its output has left, or the disk is full."""
    try:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
    except OSError:
        discard_output()


def is_output_unread() -> bool:
    """Whether standard output is a pipe whose reader has left."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), select.POLLOUT)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def output_error() -> str | None:
    """Return why standard output cannot be written, for example a full disk; None if it can.

    Writes a line end to find out, because an unbuffered stream keeps nothing of the write that failed.
    """
    try:
        sys.stdout.flush()
        os.write(sys.stdout.fileno(), b"\n")
    except OSError as error:
        return error.strerror or str(error)
    return None


def discard_output() -> None:
    """Redirect standard output to the null device. Otherwise Python fails again when it flushes at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
