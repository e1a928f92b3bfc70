"""The folder of an adapter: read it, and copy it to a folder that all hosts share. Blocks on the disk."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import msgspec

from ...shared.errors import AdapterFileError, ConfigurationError, ValidationError
from ...shared.lora.peft_config import PeftConfig, read_peft_config
from ...shared.params.adapters import ADAPTER_FILES, CONFIG_FILE, WEIGHTS_FILE, adapter_digest
from ...shared.values.encodable import check_path
from ...shared.values.shown import shown


class AdapterFolder(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter on this host's disk; ``num_bytes`` is the size of the files that are its content."""

    path: Path
    digest: str
    config: PeftConfig
    num_bytes: int


def inspect_folder(path: str | Path) -> AdapterFolder:
    """Read a folder as written by PEFT's ``save_pretrained``.

    Raises:
        ValidationError: ``path`` is not a path.
        AdapterFileError: a file is missing or invalid.
        UnsupportedAdapterError: no engine of this version can compute such an adapter.
    """
    if not isinstance(path, str | Path) or not str(path):
        raise ValidationError(f"lora_path must be the path of a folder, got {shown(path)}")
    check_path("lora_path", str(path))
    # os.path leaves the home of an unknown user unchanged, where pathlib raises.
    folder = Path(os.path.abspath(os.path.expanduser(path)))
    # First, because an invalid config must be reported before a large file is read.
    config = read_peft_config(folder) if os.path.isdir(folder) else None
    digest = adapter_digest(folder)
    assert config is not None  # otherwise adapter_digest has raised
    num_bytes = sum((folder / name).stat().st_size for name in (CONFIG_FILE, WEIGHTS_FILE))
    return AdapterFolder(path=folder, digest=digest, config=config, num_bytes=num_bytes)


def copy_into(shared_folder: str | Path, adapter: AdapterFolder) -> AdapterFolder:
    """Copy an adapter into the folder that all hosts share, under its digest, and return the copy.

    The copy appears whole or not at all. An existing copy is left unchanged.

    Raises:
        ConfigurationError: the folder cannot be written to.
        AdapterFileError: the adapter has changed meanwhile, or the existing copy under its digest has other contents.
    """
    into = Path(os.path.abspath(os.path.expanduser(shared_folder)))
    target = into / adapter.digest
    try:
        into.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            _copy(adapter, into, target)
    except OSError as error:
        raise ConfigurationError(
            f"the folder {into} for adapters cannot be used ({error.strerror}); name another one"
        ) from error
    if adapter_digest(target) != adapter.digest:
        raise AdapterFileError(f"{target} does not have the contents of its name: remove that folder, and try again")
    return msgspec.structs.replace(adapter, path=target)


def _copy(adapter: AdapterFolder, into: Path, target: Path) -> None:
    incoming = Path(tempfile.mkdtemp(prefix=".incoming-", dir=into))
    try:
        for name in ADAPTER_FILES:
            copy = Path(shutil.copyfile(adapter.path / name, incoming / name))
            with copy.open("rb") as file:
                os.fsync(file.fileno())
        if adapter_digest(incoming) != adapter.digest:
            raise AdapterFileError(f"the adapter in {adapter.path} changed while it was copied; try again")
        incoming.chmod(0o755)
        try:
            os.rename(incoming, target)
        except OSError:
            if not target.exists():  # otherwise another process copied it first
                raise
    finally:
        shutil.rmtree(incoming, ignore_errors=True)
