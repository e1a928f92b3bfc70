"""Calls about the model that an engine serves: its weights, adapters and tokenizer; under the rules of ``calls``."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

import msgspec

from ..errors import ValidationError
from ..params.checks import check_token_ids
from ..params.lora import LoRARequest
from ..values.checks import check_text, check_timeout
from ..values.shown import shown

RELOAD_MODES = ("wait", "keep", "abort")
MAX_VERSION_CHARS = 128
DEFAULT_SHARD_PATTERN = "model-rank-{rank}-part-{part}.safetensors"


def _check_lora_id(lora_id: object) -> None:
    if isinstance(lora_id, bool) or not isinstance(lora_id, int) or lora_id < 1:
        raise ValidationError(f"lora_id must be an integer of at least 1, got {shown(lora_id)}")


class AddLora(msgspec.Struct, array_like=True, tag="add_lora"):
    """Load an adapter, for later requests. Answer: ``LoraChanged``, or ``UnsupportedCallError``."""

    lora_request: LoRARequest

    def __post_init__(self) -> None:
        if not isinstance(self.lora_request, LoRARequest):
            raise ValidationError(f"lora_request must be a LoRARequest, got {shown(self.lora_request)}")


class RemoveLora(msgspec.Struct, array_like=True, tag="remove_lora"):
    """Unload an adapter. Answer: ``LoraChanged``."""

    lora_id: int

    def __post_init__(self) -> None:
        _check_lora_id(self.lora_id)


class ListLoras(msgspec.Struct, array_like=True, tag="list_loras"):
    """List the loaded adapters. Answer: ``LoraList``."""


class PinLora(msgspec.Struct, array_like=True, tag="pin_lora"):
    """Keep an adapter loaded whatever others are added; or no longer than others, if ``pinned`` is False.

    Answer: ``LoraChanged``, or ``UnsupportedCallError``.
    """

    lora_id: int
    pinned: bool = True

    def __post_init__(self) -> None:
        _check_lora_id(self.lora_id)


class LoraChanged(msgspec.Struct, array_like=True, tag="lora_changed"):
    """``success`` is False if nothing changed: the adapter was loaded already, or is not loaded."""

    success: bool


class LoraList(msgspec.Struct, array_like=True, tag="lora_list"):
    """Ids of the loaded adapters."""

    lora_ids: list[int]


class Tokenize(msgspec.Struct, array_like=True, omit_defaults=True, kw_only=True, tag="tokenize"):
    """Encode a text, or chat messages under the chat template, as token ids. Answer: ``TokenizedText``.

    Args:
        add_special_tokens: add those around a text; the chat template writes its own.
        has_pieces: return the bytes of each token.
    """

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    has_pieces: bool = False

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise ValidationError("exactly one of prompt and messages must be given")
        if self.prompt is not None:
            check_text("prompt", self.prompt)


class Detokenize(msgspec.Struct, array_like=True, tag="detokenize"):
    """Decode token ids, special tokens included. Answer: ``DetokenizedText``."""

    token_ids: list[int]

    def __post_init__(self) -> None:
        check_token_ids("tokens", self.token_ids)


class GetTokenizer(msgspec.Struct, array_like=True, tag="get_tokenizer"):
    """Return the model's tokenizer. Answer: ``TokenizerFile``."""


class TokenizedText(msgspec.Struct, array_like=True, omit_defaults=True, tag="tokenized_text"):
    """``pieces`` are the bytes of each token, if they were requested."""

    token_ids: list[int]
    max_model_len: int
    pieces: list[bytes] = []


class DetokenizedText(msgspec.Struct, array_like=True, tag="detokenized_text"):
    """The text of the token ids."""

    text: str


class TokenizerFile(msgspec.Struct, array_like=True, tag="tokenizer_file"):
    """``data`` is the model's ``tokenizer.json``, compressed by zlib."""

    data: bytes


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
