"""Every option with a value of its kind, and the effective values in a process that is given some."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from penstock.shared.process.command_line import Parser
from penstock.worker.options.numbers import Integer, IntegerOrRange, Number, Share, Size
from penstock.worker.options.option import DeclaredOption
from penstock.worker.options.program import Program
from penstock.worker.options.readers import BandSeconds, Choice, Folder, Indices, Model, Switch, SwitchOrText, Texts
from penstock.worker.options.settings import Settings, read_settings
from penstock.worker.programs import PROGRAMS

ROOT = Path(__file__).parents[3]

# By kind of value: words, the same in TOML, and the value of both.
SAMPLES: dict[type, tuple[str, str, Any]] = {
    Folder: ("/some/folder", '"/some/folder"', "/some/folder"),
    Model: ("org/model", '"org/model"', "org/model"),
    Switch: ("yes", "true", True),
    SwitchOrText: ("/a/socket", '"/a/socket"', "/a/socket"),
    Share: ("0.25", "0.25", 0.25),
    Size: ("1.5GiB", '"1.5GiB"', 3 << 29),
    Integer: ("7", "7", 7),
    IntegerOrRange: ("2:07", '"2:7"', "2:7"),
    Number: ("2.5", "2.5", 2.5),
    Texts: ("one,two", '["one", "two"]', ("one", "two")),
    Indices: ("2,0", "[2, 0]", (2, 0)),
    BandSeconds: ("batch=9,chat=1.5", "{ batch = 9, chat = 1.5 }", {"batch": 9.0, "chat": 1.5}),
}
EVERY = [pytest.param(p, option, id=f"{p.name.split('.')[-1]}-{option.name}") for p in PROGRAMS for option in p.options]


def sample(option: DeclaredOption) -> tuple[str, str, Any]:
    reader = option.option.reader
    if isinstance(reader, Choice):
        other = next(value for value in reader.values if value != option.default)
        return other, f'"{other}"', other
    if type(reader) is Switch and option.default is True:
        return "no", "false", False
    return next((SAMPLES[kind] for kind in type(reader).__mro__ if kind in SAMPLES), ("text", '"text"', "text"))


@functools.cache
def _parser_of(program: Program) -> Parser:
    """Return the parser: it keeps nothing of earlier words, and takes ten times as long to make as to read with."""
    parser = Parser()
    program.add_arguments(parser)
    return parser


def read(
    program: Program, *words: str, environment: dict[str, str] | None = None, file: Path | None = None
) -> Settings:
    config = ("--config", str(file)) if file else ()
    return read_settings(program, PROGRAMS, _parser_of(program).parse_args([*words, *config]), environment or {})


def value(settings: Settings, name: str) -> Any:
    return next(setting.value for setting in settings.all if setting.declared.name == name)


def source(settings: Settings, name: str) -> str:
    return next(setting.source for setting in settings.all if setting.declared.name == name)


def words_of(option: DeclaredOption, words: str) -> list[str]:
    if type(option.option.reader) is Switch:
        return [option.flag if words == "yes" else f"--no-{option.flag.removeprefix('--')}"]
    return [option.flag, words]
