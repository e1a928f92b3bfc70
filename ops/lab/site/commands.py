"""The page of all commands with their options, from the parsers of the programs."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from importlib import import_module

from ....shared.process.command_line import Command, Parser
from ....worker.cli import load_commands
from ....worker.programs import guide_tables
from ... import cli
from .tables import table


def lines() -> Iterator[str]:
    """Yield the lines of the page."""
    yield from (
        "# Options of commands",
        "",
        "[Commands](commands.md) says what each command is for. This page has their arguments, as `--help` shows them.",
        "",
    )
    modules = [spec.rpartition(".") for spec in cli.COMMANDS.values() if not spec.startswith(cli.LAB)]
    commands = [getattr(import_module(module, cli.__name__), constant) for module, _, constant in modules]
    for program, members in (("worker", load_commands()), ("penstock", commands)):
        for command in members:
            yield from _command(program, command)


def _command(program: str, command: Command, depth: int = 2) -> Iterator[str]:
    """Yield a section; nothing for a command that forwards its arguments to a program of the worker."""
    if command.forwards_arguments:
        return
    name = f"{program} {command.name}"
    yield from (f"{'#' * depth} {name}", "", command.summary.rstrip(".") + ".", "")
    if command.name == "start":
        yield from ("[Configuration](configuration.md) describes variables and the file.", "")
        yield from guide_tables().splitlines()
        yield ""
        return
    yield from _arguments(name, command)
    for child in command.subcommands:
        yield from _command(name, child, depth + 1)


def _arguments(name: str, command: Command) -> Iterator[str]:
    parser = Parser(prog=name)
    command.add_arguments(parser)
    # argparse has no public list of a parser's arguments.
    actions = [action for action in parser._actions if action.help != argparse.SUPPRESS and action.dest != "help"]
    yield from table(("argument", "meaning"), [(_name(action), _help(parser, action)) for action in actions])


def _name(action: argparse.Action) -> str:
    value = _value(action)
    return f"`{' '.join([', '.join(action.option_strings), value]).strip()}`"


def _value(action: argparse.Action) -> str:
    if action.nargs == 0:
        return ""
    choices: Sequence[object] = tuple(action.choices or ())
    default = action.dest.upper() if action.option_strings else action.dest
    name = str(action.metavar or ("|".join(map(str, choices)) if choices else default))
    return {"*": f"[{name} …]", "+": f"{name} …", "?": f"[{name}]"}.get(str(action.nargs), name)


def _help(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    return (action.help or "") % {**vars(action), "prog": parser.prog}
