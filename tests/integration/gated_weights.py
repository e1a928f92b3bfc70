"""A model that can be loaded while its weights are there, and not while they are a FIFO that nobody writes."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from ..conftest import DEMO_MODEL

SHARD = "model-00001-of-00001.safetensors"


class GatedModel:
    """The demo model, whose weights can be had while ``open`` holds: what loads it meanwhile waits."""

    def __init__(self, folder: Path) -> None:
        shutil.copytree(DEMO_MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors"))
        names = _tensor_names(DEMO_MODEL / "model.safetensors")
        index = {"metadata": {}, "weight_map": dict.fromkeys(names, SHARD)}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        self.folder = folder
        self.open()

    def open(self) -> None:
        fresh = self.folder / "fresh"
        shutil.copyfile(DEMO_MODEL / "model.safetensors", fresh)
        fresh.rename(self.folder / SHARD)

    def shut(self) -> None:
        (self.folder / SHARD).unlink()
        os.mkfifo(self.folder / SHARD)


def _tensor_names(file: Path) -> list[str]:
    data = file.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return [name for name in header if name != "__metadata__"]
