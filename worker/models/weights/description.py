"""What has to be the same of two folders for the weights of one to take the place of the other's in a running engine.

All but the weights stays: the network that computes, the KV cache, the tokenizer of the worker process, what clients
were told of the model.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec

from ....shared.errors import ModelLoadError
from ....shared.shown import shown
from ..folder import CONFIG_FILE, TOKENIZER_FILE
from ..formats.declared import QUANTIZATION_FIELDS, declared_quantization
from .safetensors_files import tensors_of

_GENERATION_FILE = "generation_config.json"
# Who wrote the folder, and how the numbers are stored in it.
_OF_THE_FILES = frozenset(
    {"_name_or_path", "name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", *QUANTIZATION_FIELDS}
)


class ModelDescription(msgspec.Struct, frozen=True):
    """A model folder as it was when it was read.

    Args:
        config: fields of ``config.json`` that say what is computed.
        tokenizer: a digest of what ``tokenizer.json`` says, however it is written; empty without that file.
        end_tokens: what ``generation_config.json`` says ends a generation.
        shapes: of tensors by name, as far as the files' headers tell them.
    """

    config: dict[str, Any]
    tokenizer: str
    end_tokens: Any
    shapes: dict[str, tuple[int, ...]]

    @classmethod
    def read(cls, folder: Path) -> ModelDescription:
        """Raises ``ModelLoadError`` if a file cannot be read."""
        whole = declared_quantization(folder) is None
        return cls(
            _without_files(_json(folder / CONFIG_FILE) or {}),
            _digest(_json(folder / TOKENIZER_FILE)),
            (_json(folder / _GENERATION_FILE) or {}).get("eos_token_id"),
            {tensor.name: tensor.shape for tensor in tensors_of(folder)} if whole else {},
        )

    def check_fits(self, other: ModelDescription, folder: Path) -> None:
        """Raises ``ModelLoadError`` unless ``other``, of ``folder``, is a model of the same form; says what differs."""
        for field in sorted(self.config.keys() | other.config.keys()):
            ours, theirs = self.config.get(field), other.config.get(field)
            if ours != theirs:
                raise _misfit(folder, f"{field} is {shown(theirs)} in its {CONFIG_FILE}, and {shown(ours)} here")
        if self.tokenizer and other.tokenizer and self.tokenizer != other.tokenizer:
            raise _misfit(folder, f"its {TOKENIZER_FILE} is another one")
        if self.end_tokens != other.end_tokens:
            told = f"eos_token_id is {shown(other.end_tokens)} in its {_GENERATION_FILE}, and {shown(self.end_tokens)}"
            raise _misfit(folder, f"{told} here")
        for name, shape in other.shapes.items():
            if self.shapes.get(name, shape) != shape:
                raise _misfit(folder, f"{name} is {list(shape)} there, and {list(self.shapes[name])} here")


def _misfit(folder: Path, why: str) -> ModelLoadError:
    return ModelLoadError(
        f"the weights in {folder} are not of the model that is served: {why}; start an engine with that folder instead"
    )


def _without_files(config: dict[str, Any]) -> dict[str, Any]:
    """``config`` without what says nothing of the computation, at any depth."""
    return {
        key: _without_files(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key not in _OF_THE_FILES
    }


def _digest(content: Any) -> str:
    return hashlib.sha256(msgspec.json.encode(content, order="sorted")).hexdigest() if content is not None else ""


def _json(file: Path) -> Any:
    try:
        return msgspec.json.decode(file.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise ModelLoadError(f"{file} cannot be read: {error}") from error
