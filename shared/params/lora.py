"""Low-rank adapters, for all processes. An adapter **is** its content: its digest names it everywhere."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

import msgspec

from ..errors import AdapterFileError, ValidationError
from ..values.arguments import CheckedNames
from ..values.checks import check_path, check_text
from ..values.shown import shown

# PEFT's file names. The weights are safetensors, since a pickle would be code.
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
ADAPTER_FILES = (CONFIG_FILE, WEIGHTS_FILE)
_CHUNK_BYTES = 1024 * 1024
_DIGEST = re.compile("[0-9a-f]{64}")


class LoRARequest(msgspec.Struct, metaclass=CheckedNames, array_like=True, omit_defaults=True, frozen=True, gc=False):
    """A low-rank adapter to apply; ``lora_int_id`` is at least 1 and unique per adapter.

    ``digest`` is ``adapter_digest`` of the folder. It is set when a request is enqueued, so that the request ends with
    the adapter that it began with, whatever name and path mean by then. "" if unknown.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str
    base_model_name: str | None = None
    load_inplace: bool = False
    digest: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.lora_int_id, bool) or not isinstance(self.lora_int_id, int) or self.lora_int_id < 1:
            raise ValidationError(f"lora_int_id must be an integer of at least 1, got {shown(self.lora_int_id)}")
        for name in ("lora_name", "lora_path"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise ValidationError(f"{name} must be a string that is not empty, got {shown(getattr(self, name))}")
            check_text(name, getattr(self, name))
        check_path("lora_path", self.lora_path)
        if self.base_model_name is not None:
            check_text("base_model_name", self.base_model_name)
        if self.digest != "":
            check_digest("digest", self.digest)


class LoraSetup(msgspec.Struct, omit_defaults=True, frozen=True, kw_only=True):
    """Capacity for adapters of an engine that serves some.

    Args:
        max_loras: different adapters in one batch, the number of slots next to the model's weights.
        max_lora_rank: the largest rank of an adapter.
        max_cpu_loras: adapters kept in host memory.
    """

    max_loras: int = 0
    max_lora_rank: int = 0
    max_cpu_loras: int = 0


def check_digest(field: str, value: object) -> str:
    """Return ``value`` if it is a digest of an adapter.

    Raises:
        ValidationError: it is not.
    """
    if not isinstance(value, str) or not _DIGEST.fullmatch(value):
        raise ValidationError(f"{field} must be 64 hexadecimal digits in lower case, got {shown(value)}")
    return value


def adapter_digest(folder: str | Path) -> str:
    """Return the digest of the adapter in a PEFT folder: the hex SHA-256 of its configuration and weights.

    Names and lengths of both files go in before their bytes, so no two contents have one digest; other files do not
    count. Reads in parts of a MiB, some 2 s for a GiB: not for an event loop.

    Raises:
        AdapterFileError: a file is missing or cannot be read, or grew or shrank meanwhile.
    """
    hashed = hashlib.sha256()
    for name in ADAPTER_FILES:
        path = Path(folder) / name
        try:
            with path.open("rb") as file:
                num_bytes = os.fstat(file.fileno()).st_size
                hashed.update(name.encode() + b"\0" + num_bytes.to_bytes(8, "big"))
                num_read = 0
                while chunk := file.read(_CHUNK_BYTES):
                    num_read += len(chunk)
                    hashed.update(chunk)
        except OSError as error:
            raise _unreadable(folder, name, error) from error
        if num_read != num_bytes:
            raise AdapterFileError(f"{path} changed while it was read; wait until it is written, and try again")
    return hashed.hexdigest()


def _unreadable(folder: str | Path, name: str, error: OSError) -> AdapterFileError:
    if not os.path.isdir(folder):  # also where the name is too long, which pathlib raises
        return AdapterFileError(
            f"there is no folder {shown(str(folder))} on this host; name a folder that PEFT saved, with {CONFIG_FILE} "
            f"and {WEIGHTS_FILE}"
        )
    reason = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
    has_pickle = name == WEIGHTS_FILE and (Path(folder) / "adapter_model.bin").exists()
    remedy = "; save the adapter as safetensors: adapter_model.bin is a pickle, and never loaded" if has_pickle else ""
    return AdapterFileError(f"{name} of the adapter in {shown(str(folder))} {reason}{remedy}")
