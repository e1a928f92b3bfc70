"""Ports for servers that a command or a test starts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from penstock.ops.lab.clusters import redis_processes
from penstock.ops.lab.clusters.redis_processes import free_ports


def draw(monkeypatch: pytest.MonkeyPatch, ports: Sequence[int]) -> None:
    left = iter(ports)
    monkeypatch.setattr(redis_processes.secrets, "choice", lambda _: next(left))
    monkeypatch.setattr(redis_processes, "_is_free", lambda port: port != 22_002)


def test_a_port_that_is_drawn_twice_or_not_free_is_drawn_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    draw(monkeypatch, [22_001, 22_001, 22_002, 22_003, 22_001, 22_004])
    assert free_ports(3) == [22_001, 22_003, 22_004]


def test_neither_is_one_so_much_higher_that_another_has(monkeypatch: pytest.MonkeyPatch) -> None:
    draw(monkeypatch, [12_001, 22_001, 12_002, 2_001, 12_003])
    assert free_ports(2, offset=10_000) == [12_001, 12_003]
