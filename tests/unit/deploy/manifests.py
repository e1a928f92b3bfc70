"""Folders of the files for deployments, and readers of them for tests."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from penstock.shared.metrics.catalogue import ALL, MetricKind

from ...yaml_files import load_yaml, load_yaml_all

DEPLOY = Path(__file__).parents[3] / "ops" / "deploy"
# Counters of the gateway itself, in producer/gateway/metrics.py and its parent process.
_OF_GATEWAYS = re.compile(r"penstock_(http|gateway)_\w+")


def tool(name: str) -> str:
    """The path of a program, or a skipped test."""
    program = shutil.which(name)
    if program is None:
        pytest.skip(f"{name} is not on the PATH")
    return program


def kustomized(folder: str) -> list[dict[str, Any]]:
    """The objects that ``kubectl apply --kustomize`` would send."""
    return load_yaml_all(_kustomize(folder))


@functools.cache
def _kustomize(folder: str) -> str:
    result = subprocess.run(
        [tool("kubectl"), "kustomize", str(DEPLOY / "kubernetes" / folder)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def alert_rules() -> dict[str, Any]:
    return load_yaml((DEPLOY / "prometheus" / "penstock.yml").read_text())


def unknown_metrics(expression: str) -> set[str]:
    """The metrics of a PromQL expression that nothing of ours exports."""
    kinds = set()
    for spec in ALL.values():
        suffixes = {MetricKind.COUNTER: ("_total",), MetricKind.GAUGE: ("",)}
        for suffix in suffixes.get(spec.kind, ("_bucket", "_sum", "_count")):
            kinds.add(f"penstock_{spec.name}{suffix}")
    named = set(re.findall(r"\bpenstock_\w+", expression))
    return {name for name in named - kinds if not _OF_GATEWAYS.fullmatch(name)}
