"""Files of other projects are the ones that their manifests name."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from penstock.ops.lab.vendor import MANIFESTS

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", MANIFESTS)
def test_each_file_is_the_one_of_its_manifest(name: str) -> None:
    folder = (ROOT / name).parent
    entries = {entry["file"]: entry for entry in json.loads((ROOT / name).read_text())}
    assert {path.name for path in folder.iterdir()} == {*entries, "manifest.json"}
    for file, entry in entries.items():
        assert hashlib.sha256((folder / file).read_bytes()).hexdigest() == entry["sha256"], file
        assert entry["version"]
        assert entry["licence"]
    assert any("LICENSE" in file for file in entries)
