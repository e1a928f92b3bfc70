"""``penstock sim``: fleets under virtual time, on the real scripts of the broker."""

from __future__ import annotations

import argparse
from pathlib import Path

from ...shared.command_line import EXIT_FAILED, Command
from ...shared.errors import ConfigurationError
from ..libraries import need_libraries


def _add_run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("scenario", type=Path, metavar="FILE", help="TOML, see the page on the simulator in the guide")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where report.json and the plots (PNG, SVG) go")
    parser.add_argument("--seed", type=int, help="instead of the scenario's")


def _add_compare_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("scenario", type=Path, metavar="FILE", help="TOML, without deaths and autoscaling")


def _add_fit_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "recorded", type=Path, metavar="FILE", help="output of `python -m penstock.worker.engine.offline --steps`"
    )


def _run(arguments: argparse.Namespace) -> int:
    need_libraries("the simulator", "simpy", "matplotlib", extra="sim")
    text = _read(arguments.scenario).decode(errors="replace")
    from ..sim.run import run_scenario  # simpy and matplotlib are not for every `penstock` command

    return 0 if run_scenario(text, seed=arguments.seed, folder=arguments.out) else EXIT_FAILED


def _compare(arguments: argparse.Namespace) -> int:
    need_libraries("the simulator", "simpy", "matplotlib", extra="sim")
    text = _read(arguments.scenario).decode(errors="replace")
    from ..sim.comparison import compare  # simpy

    compare(text)
    return 0


def _fit(arguments: argparse.Namespace) -> int:
    need_libraries("the simulator", "simpy", "matplotlib", extra="sim")
    data = _read(arguments.recorded)
    from ..sim.fit import fit_speed  # numpy

    fit = fit_speed(data)
    speed = fit.speed
    print(
        f"speed = {{fixed_ms = {speed.fixed_ms:g}, ms_per_seq = {speed.ms_per_seq:g}, "
        f"ms_per_prompt_token = {speed.ms_per_prompt_token:g}}}  "
        f"# of {fit.num_steps} steps, median error {100 * fit.error:.0f} %"
    )
    return 0


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from error


COMMAND = Command(
    "sim",
    "Simulate fleets of engines under virtual time, on the real scripts of the queue.",
    subcommands=(
        Command("run", "Simulate a scenario; status 1 if one of its checks fails.", _run, _add_run_arguments),
        Command(
            "compare",
            "Run a scenario in virtual and in real time, and print both.",
            _compare,
            _add_compare_arguments,
        ),
        Command("fit", "Fit the speed of an engine to its recorded steps.", _fit, _add_fit_arguments),
    ),
)
