"""The content of an adapter's digest, and the message where there is none."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from penstock.shared.errors import AdapterFileError, ValidationError
from penstock.shared.params.lora import LoRARequest, adapter_digest


def write_adapter(folder: Path, config: bytes = b"{}", weights: bytes = b"w") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_bytes(config)
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return folder


def test_the_digest_is_that_of_both_files_and_of_nothing_else(tmp_path: Path) -> None:
    weights = b"w" * (3 * 1024 * 1024 + 1)
    adapter = write_adapter(tmp_path / "a", b'{"r": 8}', weights)
    framed = b"adapter_config.json\0" + (8).to_bytes(8, "big") + b'{"r": 8}'
    framed += b"adapter_model.safetensors\0" + len(weights).to_bytes(8, "big") + weights
    assert adapter_digest(adapter) == hashlib.sha256(framed).hexdigest()
    (adapter / "README.md").write_text("for people")
    assert adapter_digest(str(adapter)) == adapter_digest(write_adapter(tmp_path / "b", b'{"r": 8}', weights))


def test_a_byte_that_moves_from_one_file_to_the_other_changes_it(tmp_path: Path) -> None:
    digests = {
        adapter_digest(write_adapter(tmp_path / name, config, weights))
        for name, config, weights in [("a", b"ab", b"c"), ("b", b"a", b"bc"), ("c", b"abc", b"")]
    }
    assert len(digests) == 3


@pytest.mark.parametrize(
    ("missing", "present", "message"),
    [
        ("adapter_config.json", None, "adapter_config.json of the adapter in .* is missing"),
        ("adapter_model.safetensors", None, "adapter_model.safetensors of the adapter in .* is missing"),
        ("adapter_model.safetensors", "adapter_model.bin", "save the adapter as safetensors"),
    ],
)
def test_a_file_that_is_missing_is_named(tmp_path: Path, missing: str, present: str | None, message: str) -> None:
    adapter = write_adapter(tmp_path / "a")
    (adapter / missing).unlink()
    if present:
        (adapter / present).write_bytes(b"")
    with pytest.raises(AdapterFileError, match=message):
        adapter_digest(adapter)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(AdapterFileError, match=r"there is no folder .*nowhere.* on this host"):
        adapter_digest(tmp_path / "nowhere")


@pytest.mark.parametrize("digest", ["A" * 64, "a" * 63, "a" * 64 + "\n", None, 7])
def test_a_request_for_an_adapter_has_a_digest_or_none(digest: object) -> None:
    with pytest.raises(ValidationError, match="digest must be 64 hexadecimal digits in lower case"):
        LoRARequest("cats", 1, "/cats", digest=digest)  # pyright: ignore[reportArgumentType]
