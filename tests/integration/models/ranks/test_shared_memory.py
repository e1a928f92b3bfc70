"""Ranks of one host that add up in memory that they share: real processes, of which one is killed or stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.kernels.native.build import build, default_cache_folder

from ....warm_python import WARM_PYTHON_VARIABLE

ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    build(default_cache_folder())


class Ranks:
    """Processes of ``summing_process``, to be left at the end."""

    def __init__(self, world: int, role: str, meeting: Path) -> None:
        python = os.environ.get(WARM_PYTHON_VARIABLE, sys.executable)
        words = [python, "-m", "tests.integration.models.ranks.summing_process"]
        self.processes = [
            subprocess.Popen(
                [*words, str(rank), str(world), str(meeting), role], cwd=ROOT, stdout=subprocess.PIPE, text=True
            )
            for rank in range(world)
        ]

    def __enter__(self) -> list[subprocess.Popen[str]]:
        return self.processes

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


@pytest.mark.parametrize("world", [2, 3])
def test_sums_are_those_of_gloo(world: int, tmp_path: Path) -> None:
    with Ranks(world, "sums", tmp_path / "meeting") as ranks:
        assert [rank.wait() for rank in ranks] == [0] * world


def test_all_do_without_where_one_has_no_kernels(tmp_path: Path) -> None:
    with Ranks(2, "without", tmp_path / "meeting") as ranks:
        assert [rank.wait() for rank in ranks] == [0, 0]


@pytest.mark.parametrize(
    ("role", "words"),
    [
        ("killed", "rank 2 of 3 is gone"),
        ("stopped", "a rank of 3 has not come for 0.5 s"),
    ],
)
def test_ranks_report_a_timeout_for_a_missing_rank(role: str, words: str, tmp_path: Path) -> None:
    with Ranks(3, role, tmp_path / "meeting") as ranks:
        told = [rank.stdout.readline().strip() for rank in ranks[:2] if rank.stdout is not None]
        assert told == [words, words]


def test_a_rank_may_exit_after_the_meeting(tmp_path: Path) -> None:
    with Ranks(3, "left", tmp_path / "meeting") as ranks:
        assert [rank.wait() for rank in ranks] == [0, 0, -signal.SIGKILL]
