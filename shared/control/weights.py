"""Calls about the weights that an engine serves; under the rules of ``calls``."""

from __future__ import annotations

from pathlib import PurePosixPath

import msgspec

from ..errors import ValidationError
from ..values.encodable import check_text
from ..values.shown import shown
from ..values.timeouts import check_timeout

RELOAD_MODES = ("wait", "keep", "abort")
MAX_VERSION_CHARS = 128
DEFAULT_SHARD_PATTERN = "model-rank-{rank}-part-{part}.safetensors"


def check_version(field: str, version: str) -> None:
    """Raise ``ValidationError`` unless ``version`` is a short name, or empty."""
    if len(check_text(field, version)) > MAX_VERSION_CHARS or not version.isprintable():
        raise ValidationError(f"{field} must be at most {MAX_VERSION_CHARS} printable characters, got {shown(version)}")


class ReloadWeights(msgspec.Struct, array_like=True, omit_defaults=True, kw_only=True, tag="reload_weights"):
    """Replace the loaded weights by those of a folder on the engine's host. Answer: ``WeightsReloaded``.

    Args:
        path: absolute path, of a model of the same architecture, shapes and tokenizer; None reads the current folder
            again.
        version: name of the new weights; "" for a digest of them.
        mode: for running requests: "wait" lets them end on the weights they began with, and changes nothing if
            they have not within ``drain_timeout_s``; "keep" queues them again, to resume after their last token, on the
            new weights here or on those of another engine; "abort" ends them with finish_reason "abort".
        drain_timeout_s: limit of the mode "wait".
        only_check: check the folder, and change nothing.
    """

    path: str | None = None
    version: str = ""
    mode: str = "wait"
    drain_timeout_s: float = 30.0
    only_check: bool = False

    def __post_init__(self) -> None:
        if self.path is not None:
            check_text("path", self.path)
            if not PurePosixPath(self.path).is_absolute():
                raise ValidationError(
                    f"path must be absolute, since it is on the engine's host, got {shown(self.path)}"
                )
        check_version("version", self.version)
        if self.mode not in RELOAD_MODES:
            raise ValidationError(f"mode must be one of {', '.join(RELOAD_MODES)}, got {shown(self.mode)}")
        check_timeout("drain_timeout_s", self.drain_timeout_s)


class WeightsReloaded(msgspec.Struct, array_like=True, omit_defaults=True, kw_only=True, tag="weights_reloaded"):
    """The weights that the engine serves now.

    Args:
        path: folder of the weights.
        version: the passed name, or a digest.
        former_version: version before the call; the same for ``only_check``.
        load_time_s: how long the engine served nothing; 0 if nothing changed.
    """

    path: str
    version: str
    former_version: str = ""
    load_time_s: float = 0.0


class SaveShardedState(msgspec.Struct, array_like=True, omit_defaults=True, tag="save_sharded_state"):
    """Write the loaded weights to a new folder of the engine's host, to be served. Answer: ``ShardedStateSaved``.

    Args:
        path: absolute path; the folder does not exist yet, or is empty.
        pattern: pattern of file names; ``{part}`` counts from 0, ``{rank}`` is 0 since the first rank writes all.
        max_size: max bytes of tensors per file; a larger tensor has its own file. None writes one file.
    """

    path: str
    pattern: str | None = None
    max_size: int | None = None

    def __post_init__(self) -> None:
        check_text("path", self.path)
        if self.pattern is not None:
            check_text("pattern", self.pattern)
        if not PurePosixPath(self.path).is_absolute():
            raise ValidationError(f"path must be absolute, since it is on the engine's host, got {shown(self.path)}")
        try:
            names = {self.shard_name(part) for part in range(2)}
        except (KeyError, IndexError, ValueError):
            names = set()
        if len(names) < 2 or any("/" in name or not name.endswith(".safetensors") for name in names):
            raise ValidationError(
                f"pattern must name a file with {{part}} in it that ends in .safetensors, got {shown(self.pattern)}"
            )
        if self.max_size is not None and (isinstance(self.max_size, bool) or self.max_size < 1):
            raise ValidationError(f"max_size must be a positive number of bytes, got {shown(self.max_size)}")

    def shard_name(self, part: int) -> str:
        """Return the name of the ``part``-th file."""
        return (self.pattern or DEFAULT_SHARD_PATTERN).format(rank=0, part=part)


class ShardedStateSaved(msgspec.Struct, array_like=True, tag="sharded_state_saved"):
    """``files`` of ``path`` hold the weights, ``num_bytes`` in all."""

    path: str
    files: list[str]
    num_bytes: int
