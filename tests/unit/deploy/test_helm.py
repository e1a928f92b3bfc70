"""The chart's template gives the manifests, by a reader of the little that the template uses of Helm."""

from __future__ import annotations

import json
import re
from functools import reduce
from typing import Any

import pytest

from ...yaml_files import load_yaml, load_yaml_all
from .manifests import DEPLOY, kustomized

jsonschema = pytest.importorskip("jsonschema")
CHART = DEPLOY / "helm" / "penstock"
VALUES: dict[str, Any] = load_yaml((CHART / "values.yaml").read_text())
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
COMMENT = re.compile(r"\{\{- /\*.*?\*/\}\}\n", re.DOTALL)
CONDITION = re.compile(r"^\{\{- if (\S+) \}\}\n(.*?)^\{\{- end \}\}\n", re.DOTALL | re.MULTILINE)
REFERENCE = re.compile(r"\{\{ (\S+) \}\}")


def render(values: dict[str, Any], namespace: str = "penstock") -> list[dict[str, Any]]:
    """Return Helm's output; anything but comments, conditions on values, and values makes invalid YAML."""
    context = {"Values": values, "Release": {"Namespace": namespace}}

    def value(reference: str) -> Any:
        return reduce(lambda mapping, name: mapping[name], reference.removeprefix(".").split("."), context)

    text = COMMENT.sub("", (CHART / "templates" / "penstock.yaml").read_text())
    text = CONDITION.sub(lambda match: match[2] if value(match[1]) else "", text)
    text = REFERENCE.sub(lambda match: str(value(match[1])), text)
    assert "{{" not in text
    return load_yaml_all(text)


def by_name(objects: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(manifest["kind"], manifest["metadata"]["name"]): manifest for manifest in objects}


def test_with_its_own_values_it_gives_the_manifests() -> None:
    assert by_name(render(VALUES)) == by_name(kustomized("base"))


def test_each_value_changes_something() -> None:
    changed = {
        "image": "registry.example.org/penstock:1",
        "workerImage": "registry.example.org/worker:1",
        "redisSecret": "other",
        "model": "other/model",
        "gpus": 2,
        "gateway": VALUES["gateway"] | {"replicas": 3},
        "worker": {"replicas": 0},
        "jobs": {"replicas": 1},
        "files": VALUES["files"] | {"storageClass": "shared"},
    }
    assert set(changed) == set(VALUES)
    for name, value in changed.items():
        assert render(VALUES | {name: value}) != render(VALUES), name
    assert render(VALUES, "elsewhere")[0]["metadata"]["namespace"] == "elsewhere"


def test_values_are_held_to_their_schema() -> None:
    jsonschema.validate(VALUES, SCHEMA)
    for wrong in ({"gpus": 0}, {"image": ""}, {"replicas": 1}, {"gateway": {"replicas": -1, "processes": 1}}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(VALUES | wrong, SCHEMA)
