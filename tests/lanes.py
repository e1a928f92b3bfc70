"""The order in which the tests of a run go to its lanes, the processes that share them.

A file is a lane's own, so that things that its tests share are made once; several files are one if they name one group.
Files that mostly compute and files that mostly wait (for starts, for deaths to be noticed) come in turns, so that
processors have something to do while others wait, and the longest files come first. `make test-cost` shows them.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

# A minute or more of a busy machine, each.
LONGEST = (
    "faults/test_chaos.py",
    "integration/models/ranks/test_ranks.py",
    "integration/groups/test_serving_groups.py",
    "faults/test_supervision.py",
    "faults/test_ranks.py",
    "integration/models/test_identity.py",
    "integration/commands/test_gpu_check.py",
    "integration/engine/images/test_images.py",
    "integration/models/graphs/test_captured.py",
    "integration/supervisor/test_fork_server.py",
    "integration/commands/test_wheel.py",
    "integration/commands/test_bench_sides.py",
    "integration/broker/contract/test_contract.py",
)
# By the first that a file lies in; all else is quick and comes last, where it evens out the ends of the lanes.
COMPUTING = ("kernels", "integration/models", "integration/engine", "integration/checkpoints")
WAITING = ("e2e", "engines", "faults", "integration")


def arrange(items: list[pytest.Item]) -> None:
    """Put the tests of a lane into the order in which they are given out, and those of a file into one group."""
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        mark = item.get_closest_marker("xdist_group")
        name = mark.args[0] if mark else item.path.relative_to(TESTS).as_posix()
        if mark is None:
            item.add_marker(pytest.mark.xdist_group(name))
        groups.setdefault(name, []).append(item)
    order = in_turns({name: _place_of({item.path for item in group}) for name, group in groups.items()})
    items[:] = [item for name in order for item in groups[name]]


def _place_of(paths: set[Path]) -> tuple[int, str]:
    """Several files that are one group take long together."""
    return (0, "") if len(paths) > 1 else place(min(paths))


def place(path: Path) -> tuple[int, str]:
    """Return the kind of file: 0 for the longest, 1 for computing files, 2 for waiting files, 3 for quick files."""
    name = path.relative_to(TESTS).as_posix()
    if name in LONGEST:
        return 0, f"{LONGEST.index(name):02}"
    for kind, folders in ((1, COMPUTING), (2, WAITING)):
        if any(name.startswith(f"{folder}/") for folder in folders):
            return kind, name
    return 3, name


def in_turns(places: dict[str, tuple[int, str]]) -> list[str]:
    """Names by their places, those of kind 1 spread evenly among those of kind 2."""
    kinds: list[list[str]] = [[], [], [], []]
    for name in sorted(places, key=lambda name: (places[name], name)):
        kinds[places[name][0]].append(name)
    longest, computing, waiting, quick = kinds
    return [*longest, *_spread(computing, waiting), *quick]


def _spread(*parts: list[str]) -> Iterable[str]:
    placed = [((index + 0.5) / len(part), name) for part in parts for index, name in enumerate(part)]
    return [name for _, name in sorted(placed)]
