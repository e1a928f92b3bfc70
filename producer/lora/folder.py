"""The folder of an adapter: what is in it, and a copy where all hosts see it. Blocks for the disk."""

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
    """An adapter as it lies on this host's disk; ``num_bytes`` are those of the files that are its content."""

    path: Path
    digest: str
    config: PeftConfig
    num_bytes: int


def inspect_folder(path: str | Path) -> AdapterFolder:
    """Read a folder as PEFT's ``save_pretrained`` writes it.

    Raises:
        ValidationError: ``path`` is no path.
        AdapterFileError: a file is missing, or says what makes no sense.
        UnsupportedAdapterError: no engine here computes such an adapter.
    """
    if not isinstance(path, str | Path) or not str(path):
        raise ValidationError(f"lora_path must be the path of a folder, got {shown(path)}")
    check_path("lora_path", str(path))
    # os.path's, which leaves the home of an unknown user as it is, where pathlib's raises.
    folder = Path(os.path.abspath(os.path.expanduser(path)))
    # First: what is wrong with it is said before a large file is read.
    config = read_peft_config(folder) if os.path.isdir(folder) else None
    digest = adapter_digest(folder)
    assert config is not None  # else there was no digest
    num_bytes = sum((folder / name).stat().st_size for name in (CONFIG_FILE, WEIGHTS_FILE))
    return AdapterFolder(path=folder, digest=digest, config=config, num_bytes=num_bytes)


def copy_into(shared_folder: str | Path, adapter: AdapterFolder) -> AdapterFolder:
    """Copy an adapter into the folder that all hosts see, under its digest, and return it as it is there.

    It is there whole, or not at all; one that is there is left as it is.

    Raises:
        ConfigurationError: the folder cannot be written to.
        AdapterFileError: the adapter has changed meanwhile, or what is there under its digest is another one.
    """
    into = Path(os.path.abspath(os.path.expanduser(shared_folder)))
    place = into / adapter.digest
    try:
        into.mkdir(parents=True, exist_ok=True)
        if not place.exists():
            _copy(adapter, into, place)
    except OSError as error:
        raise ConfigurationError(
            f"the folder {into} for adapters cannot be used ({error.strerror}); name another one"
        ) from error
    if adapter_digest(place) != adapter.digest:
        raise AdapterFileError(f"{place} is not the adapter that its name says: remove that folder, and try again")
    return msgspec.structs.replace(adapter, path=place)


def _copy(adapter: AdapterFolder, into: Path, place: Path) -> None:
    incoming = Path(tempfile.mkdtemp(prefix=".incoming-", dir=into))
    try:
        for name in ADAPTER_FILES:
            copied = Path(shutil.copyfile(adapter.path / name, incoming / name))
            with copied.open("rb") as file:
                os.fsync(file.fileno())
        if adapter_digest(incoming) != adapter.digest:
            raise AdapterFileError(f"the adapter in {adapter.path} changed while it was copied; try again")
        incoming.chmod(0o755)
        try:
            os.rename(incoming, place)
        except OSError:
            if not place.exists():  # else another copy of it was sooner
                raise
    finally:
        shutil.rmtree(incoming, ignore_errors=True)
