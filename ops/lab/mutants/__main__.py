"""Apply each mutation to a copy of the sources, run its tests, and print which test notices it.

`make mutants` runs all of them, `make mutants MUTANTS='--only reader'` those whose defect or file contains a word. The
exit status is 1 if a mutation survives that is not argued to be equivalent, or if one is noticed only by a time limit.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from .mutation import Mutation
from .table import MUTATIONS

ROOT = Path(__file__).parents[3]
PARTS = ("kernels", "ops", "producer", "shared", "worker")
TEST_LIMIT_S = 120
RUN_LIMIT_S = 900
_TESTS_FAILED = 1


@dataclass(frozen=True)
class Verdict:
    """Result of one mutation: the first test that failed, empty if none did, and how the run ended otherwise."""

    noticed_by: str
    trouble: str = ""


class SourceTree:
    """A copy of the tracked sources, imported as ``penstock`` by the tests that run in it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout
        for name in names.decode().rstrip("\0").split("\0"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
        package = folder / ".mutants" / "penstock"
        package.mkdir(parents=True)
        for part in PARTS:
            (package / part).symlink_to(folder / part)

    def judge(self, mutation: Mutation) -> Verdict:
        """Run the tests of ``mutation`` with it applied, until one fails; restores the sources."""
        file = self._folder / mutation.file
        original = file.read_text()
        file.write_text(mutation.apply(original))
        try:
            # One run each, because pytest would put the tests of several overlapping folders into its own order.
            verdicts = map(self._run_tests, mutation.tests)
            return next((verdict for verdict in verdicts if verdict != Verdict("")), Verdict(""))
        finally:
            file.write_text(original)

    def _run_tests(self, tests: str) -> Verdict:
        options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", f"--timeout={TEST_LIMIT_S}"]
        environment = {**os.environ, "PYTHONPATH": str(self._folder / ".mutants"), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "pytest", *options, tests]
        try:
            run = subprocess.run(
                command,
                cwd=self._folder,
                env=environment,
                capture_output=True,
                text=True,
                timeout=RUN_LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Verdict("", f"no end within {RUN_LIMIT_S} s")
        if run.returncode == 0:
            return Verdict("")
        failure = re.search(r"^(?:FAILED|ERROR) (\S+)", run.stdout, re.MULTILINE)
        if run.returncode != _TESTS_FAILED or failure is None:
            return Verdict("", f"pytest exited with {run.returncode}: {(run.stdout + run.stderr).strip()[-300:]}")
        is_slow = "Failed: Timeout" in run.stdout or "Timeout >" in run.stdout
        return Verdict(failure[1], f"only after {TEST_LIMIT_S} s" if is_slow else "")


def judge_all(mutations: list[Mutation], num_jobs: int) -> Iterator[tuple[Mutation, Verdict]]:
    """Judge all mutations in ``num_jobs`` copies side by side; yields verdicts in the order of the table."""
    with tempfile.TemporaryDirectory(prefix="penstock-mutants-") as folder, ThreadPoolExecutor(num_jobs) as threads:
        trees = threading.local()

        def judge(mutation: Mutation) -> Verdict:
            if not hasattr(trees, "tree"):
                trees.tree = SourceTree(Path(tempfile.mkdtemp(dir=folder)))
            return trees.tree.judge(mutation)

        yield from zip(mutations, threads.map(judge, mutations), strict=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("--only", metavar="WORD", help="mutations whose defect or file contains WORD")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="mutations that run side by side (default 2)")
    options = parser.parse_args()
    chosen = [one for one in MUTATIONS if not options.only or options.only in f"{one.defect} {one.file}"]
    if not chosen:
        parser.error(f"--only {options.only!r} matches no mutation")
    num_survivors = 0
    for mutation, verdict in judge_all(chosen, options.jobs):
        is_fine = (verdict.noticed_by and not verdict.trouble) or mutation.equivalent
        num_survivors += not is_fine
        outcome = (
            verdict.noticed_by or "NOT NOTICED" if not mutation.equivalent else f"equivalent: {mutation.equivalent}"
        )
        print(f"{mutation.defect}\n    {outcome}{f' ({verdict.trouble})' if verdict.trouble else ''}", flush=True)
    print(f"{len(chosen)} mutations: {len(chosen) - num_survivors} noticed, {num_survivors} not")
    return 1 if num_survivors else 0


if __name__ == "__main__":
    sys.exit(main())
