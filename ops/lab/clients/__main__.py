"""Install programs, try them against a deployment, and write the table."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from .deployment import Deployment
from .program import FailureError, Installed, Program, Trial
from .programs import PROGRAMS

WORKS = "works"
Row = tuple[str, str, str, str]


def main() -> int:
    """Return 0 if everything worked, else 1."""
    arguments = _arguments()
    programs = [program for program in PROGRAMS if not arguments.only or program.name in arguments.only]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="penstock-clients-") as name, Deployment(Path(name)) as deployment:
        for program in programs:
            for row in _try_program(program, deployment, arguments.folder.resolve(), Path(name)):
                print(" | ".join(row), flush=True)
                rows.append(row)
    if arguments.out is not None:
        arguments.out.write_text(_page(rows))
    return 0 if all(row[3] == WORKS for row in rows) else 1


def _try_program(program: Program, deployment: Deployment, installs: Path, folder: Path) -> list[Row]:
    installed = Installed(program, installs)
    try:
        installed.install()
    except FailureError as error:
        return [(program.name, "", "", str(error))]
    rows: list[Row] = []
    for attempt in program.tries:
        trial = Trial(installed, deployment, folder / program.name)
        try:
            attempt.run(trial)
            result = WORKS
        except FailureError as error:
            result = str(error)
        rows.append((program.name, installed.version, attempt.label, result))
    return rows


def _page(rows: list[Row]) -> str:
    lines = [
        "# Programs and SDKs",
        "",
        "Made by `make clients`. The engines answer by a script. All else is real: the program in an empty home,",
        'the gateway, Redis and two workers. An agent has the task to create a file. "Engine killed": the engine that',
        "gives the first answer is killed with SIGKILL after its first tokens.",
        "",
        "| program | version | tried | result |",
        "|---|---|---|---|",
    ]
    return "\n".join(
        [*lines, *(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows), ""]
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make clients", description=__doc__)
    parser.add_argument("--only", action="append", choices=[program.name for program in PROGRAMS], default=[])
    parser.add_argument("--folder", type=Path, default=Path(".clients"), help="where programs are installed (.clients)")
    parser.add_argument("--out", type=Path, help="file of the table")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
