"""The frame of the programs: nested commands, errors in one sentence, tables."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

import pytest
import redis

from penstock.shared.errors import ConfigurationError
from penstock.shared.process.command_line import Command, UsageError, format_table, run_program
from penstock.shared.values.shown import format_bytes

from ..processes import DEADLINE_S


def program(*commands: Command, argv: list[str]) -> int:
    return run_program("prog", "A program.", commands, argv)


def test_nested_commands_and_their_arguments() -> None:
    levels: list[str] = []

    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--word")

    def say(arguments: argparse.Namespace) -> int:
        levels.append(arguments.word)
        return 7

    group = Command("group", "A group.", subcommands=(Command("say", "Say.", run=say, add_arguments=add_arguments),))
    assert program(group, argv=["group", "say", "--word", "hello"]) == 7
    assert levels == ["hello"]


@pytest.mark.parametrize("rest", [["--help"], ["start", "--gpus", "0,1", "--", "-x"], []])
def test_forwarded_arguments_are_left_alone(rest: list[str]) -> None:
    calls: list[list[str]] = []

    def forward(arguments: argparse.Namespace) -> int:
        calls.append(arguments.rest)
        return 0

    assert program(Command("to", "Forward.", run=forward, forwards_arguments=True), argv=["to", *rest]) == 0
    assert calls == [rest]


@pytest.mark.parametrize(
    ("error", "status"), [(ConfigurationError("no."), 1), (UsageError("no."), 2), (redis.ConnectionError("no."), 1)]
)
def test_errors_end_in_a_sentence(error: Exception, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(_: argparse.Namespace) -> int:
        raise error

    assert program(Command("fail", "Fail.", run=fail), argv=["fail"]) == status
    assert capsys.readouterr().err == "error: no.\n"


@pytest.mark.parametrize(
    ("message", "sentence"),
    [("it ended:\nTraceback\n  last words\n", "Traceback\n  last words\nerror: it ended:\n"), ("", "error: E\n")],
)
def test_the_last_line_is_the_sentence(message: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    class E(ConfigurationError):
        pass

    def fail(_: argparse.Namespace) -> int:
        raise E(message)

    assert program(Command("fail", "Fail.", run=fail), argv=["fail"]) == 1
    assert capsys.readouterr().err == sentence


def test_interrupt_is_no_traceback() -> None:
    def interrupt(_: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    assert program(Command("wait", "Wait.", run=interrupt), argv=["wait"]) == 130


def test_unknown_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        program(Command("known", "Known.", run=lambda _: 0), argv=["unknown"])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert "prog --help" in error
    assert error.count("\n") == 1


def add_model_and_prompts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompts", nargs="*")
    parser.add_argument("--model", required=True)
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--stream", action="store_true")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["ask", "--modle", "m"], "unknown option --modle; did you mean --model?"),
        (["ask", "--modle=m"], "unknown option --modle; did you mean --model?"),
        (["ask", "--model", "m", "--max_tokens", "3"], "unknown option --max_tokens; did you mean --max-tokens?"),
        (["ask", "--stream", "--zzz"], "unknown option --zzz (see prog ask --help)"),
        (["ask", "-m", "x"], "unknown option -m (see prog ask --help)"),
        (["--model", "m", "ask"], "unknown option --model; the options of a command come after its name"),
        (["ask"], "required: --model"),
        (["ask", "--model"], "argument --model: expected one argument"),
        (["ask", "--model", "--zzz"], "argument --model: expected one argument"),
        (["ask", "--m", "3"], "ambiguous option: --m could match --model, --max-tokens"),
    ],
)
def test_an_unknown_option_is_named_before_all_else(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = Command("ask", "Ask.", run=lambda _: 0, add_arguments=add_model_and_prompts)
    with pytest.raises(SystemExit) as caught:
        program(command, argv=argv)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "prompt", [["-5"], ["- a list"], ["--no option, I say"], ["-"], ["--", "--zzz"], ["--max", "3", "--str"]]
)
def test_known_options_and_values_are_accepted(prompt: list[str]) -> None:
    command = Command("ask", "Ask.", run=lambda _: 7, add_arguments=add_model_and_prompts)
    assert program(command, argv=["ask", "--model", "m", *prompt]) == 7


def test_reader_that_leaves_early_is_no_traceback() -> None:
    code = (
        "import sys; from penstock.shared.process.command_line import Command, run_program\n"
        "def run(_):\n    [print('x' * 1000) for _ in range(1000)]\n    return 0\n"
        "sys.exit(run_program('prog', '', (Command('run', '', run=run),), ['run']))"
    )
    writer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert writer.stdout is not None
    writer.stdout.close()
    assert writer.stderr is not None
    assert writer.stderr.read() == b""
    writer.stderr.close()
    assert writer.wait(timeout=DEADLINE_S) == 1


def test_table_is_aligned_and_uncut() -> None:
    assert format_table(("A", "LONG"), [("x" * 100, "y"), ("", "z")]).splitlines() == [
        "A" + " " * 101 + "LONG",
        "x" * 100 + "  y",
        " " * 102 + "z",
    ]


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (2048, "2 KiB"), (45 << 20, "45 MiB"), (3 << 29, "1.5 GiB")]
)
def test_bytes_in_words(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


def test_a_name_that_the_terminal_cannot_encode_is_written_with_escapes() -> None:
    script = (
        "from penstock.shared.process.command_line import Command, run_program\n"
        "text = 'm\\u00fcller\\u2028 \\u2584\\u2502 1\\u202f234\\u2026'\n"
        "say = Command('say', 'Say.', run=lambda _: print(text) or print('acme') or 0)\n"
        "raise SystemExit(run_program('prog', 'A program.', [say], ['say']))"
    )
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    ended = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, "m\\xfcller\\u2028 =| 1 234~\nacme\n"), "tables keep their columns"


@pytest.mark.parametrize("command", ["bench", "chaos"])
def test_commands_of_the_laboratory_need_a_clone(command: str) -> None:
    """Run as in the wheel, which leaves the laboratory out."""
    code = f"""
import sys
from importlib.abc import MetaPathFinder

class Refuse(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "penstock.ops.lab":
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Refuse())
from penstock.ops.cli import main
sys.exit(main(["{command}", "--seed", "0"]))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    sentence = "error: this command is not part of the installed package; run it in a clone of Penstock's repository\n"
    assert (result.returncode, result.stdout, result.stderr) == (2, "", sentence)


@pytest.mark.parametrize(
    ("words", "status", "text"),
    [
        ("--help", 0, "usage: penstock"),
        ("run smollm2", 1, "error: penstock run needs psutil, torch, transformers: pip install 'penstock-llm[all]'"),
        ("demo", 1, "error: penstock demo needs rich, psutil, torch, transformers: pip install 'penstock-llm[all]'"),
    ],
)
def test_programs_work_where_only_the_client_is_installed(words: str, status: int, text: str) -> None:
    code = f"""
import sys
from importlib.machinery import PathFinder
from importlib.metadata import packages_distributions

hidden = set(packages_distributions()) - {{"redis", "jwt", "async_timeout", "msgspec", "structlog", "penstock"}}

class Client(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in hidden else super().find_spec(name, path, target)

sys.meta_path = [Client if finder is PathFinder else finder for finder in sys.meta_path]
from penstock.ops.cli import main
sys.exit(main({words.split()!r}))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr.count("\n")) == (status, int(status != 0)), result.stderr
    assert (result.stdout + result.stderr).startswith(text)
