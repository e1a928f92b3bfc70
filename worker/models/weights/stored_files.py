"""The weights of a folder as safetensors files: read from their headers, or written from memory.

Headers give the tensors, a version, and the form that replacements must have. The version is a short name, the same on
every host that has the same files. A checkpoint of gigabytes is not read for it: some bytes in the middle of each
tensor count, in addition to all names, types and shapes. So it distinguishes checkpoints, which differ everywhere, and
proves nothing. Whoever changes single rows should name the version.

Weights of another folder can replace those of a running engine if everything else is the same: the network, the KV
cache, the tokenizer of the worker process, and the model's properties that clients know.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ....shared.control.model import SaveShardedState, ShardedStateSaved
from ....shared.errors import EngineStateError, ModelLoadError
from ....shared.values.shown import shown
from ..checkpoint.folder import CONFIG_FILE, TOKENIZER_FILE
from ..formats.declared import COMPANION_FILES, QUANTIZATION_FIELDS, declared_quantization
from ..loaded import LoadedModel
from ..placing.packed_linear import has_file_numbers

_SAMPLE_BYTES = 4096
_DIGITS = 12
# Suffixes of other weight files.
_OTHER_SUFFIXES = (".bin", ".gguf", ".pt", ".pth")
_GENERATION_FILE = "generation_config.json"
# Fields about the author of the folder, and about how numbers are stored in it.
_OF_THE_FILES = frozenset(
    {"_name_or_path", "name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", *QUANTIZATION_FIELDS}
)

INDEX_FILE = "model.safetensors.index.json"
WHOLE_FILE = "model.safetensors"
_MAX_HEADER_BYTES = 100 << 20
# Suffixes of any weights, which are not copied. Other files are: configuration, tokenizer, chat template, code.
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".index.json")
_DTYPE_FIELDS = ("dtype", "torch_dtype")


class StoredTensor(NamedTuple):
    """A tensor in a file, whose bytes are from ``start`` to ``end``."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    end: int


class _Header(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files that transformers would read, in order; empty if there are none."""
    try:
        index = msgspec.json.decode((folder / INDEX_FILE).read_bytes(), type=_Index)
    except FileNotFoundError:
        return [folder / WHOLE_FILE] if (folder / WHOLE_FILE).is_file() else []
    except (OSError, msgspec.DecodeError) as error:
        raise ModelLoadError(f"{folder / INDEX_FILE} cannot be read: {error}") from error
    # As in transformers, a whole file takes precedence over an index.
    if (folder / WHOLE_FILE).is_file():
        return [folder / WHOLE_FILE]
    return [folder / name for name in sorted(set(index.weight_map.values()))]


def tensors_of(folder: Path) -> Iterator[StoredTensor]:
    """Yield all tensors of the folder's safetensors files.

    Raises:
        ModelLoadError: a file cannot be read, or is no safetensors file.
    """
    for file in weight_files(folder):
        yield from _tensors_in(file)


def _tensors_in(file: Path) -> Iterator[StoredTensor]:
    try:
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            if size > _MAX_HEADER_BYTES:
                raise ModelLoadError(f"{file} is no safetensors file: its header would have {size:,} bytes")
            header = msgspec.json.decode(opened.read(size), type=dict[str, msgspec.Raw])
        for name, raw in header.items():
            if name != "__metadata__":
                entry = msgspec.json.decode(raw, type=_Header)
                start, end = entry.data_offsets
                yield StoredTensor(name, entry.dtype, entry.shape, file, 8 + size + start, 8 + size + end)
    except (OSError, msgspec.DecodeError) as error:
        raise ModelLoadError(f"{file} cannot be read: {error}") from error


def weights_version(folder: Path) -> str:
    """Return the version of the weights. Raises ``ModelLoadError`` if a file cannot be read."""
    digest = hashlib.sha256()
    try:
        for tensor in sorted(tensors_of(folder), key=lambda tensor: tensor.name):
            digest.update(f"{tensor.name} {tensor.dtype} {tensor.shape}\n".encode())
            digest.update(_sample(tensor.file, tensor.start, tensor.end))
        for file in sorted(folder.iterdir()):
            if file.suffix in _OTHER_SUFFIXES:
                size = file.stat().st_size
                digest.update(f"{file.name} {size}\n".encode())
                for part in range(8):
                    digest.update(_sample(file, size * part // 8, size * (part + 1) // 8))
    except OSError as error:
        raise ModelLoadError(f"the weights in {folder} cannot be read: {error}") from error
    return digest.hexdigest()[:_DIGITS]


def _sample(file: Path, start: int, end: int) -> bytes:
    size = min(_SAMPLE_BYTES, end - start)
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.pread(descriptor, size, start + (end - start - size) // 2)
    finally:
        os.close(descriptor)


class ModelDescription(msgspec.Struct, frozen=True):
    """A model folder at the time it was read.

    Args:
        config: fields of ``config.json`` that determine the computation.
        folder: the folder.
        tokenizer: digest of ``tokenizer.json`` without spaces; "" without that file.
        end_tokens: tokens that end a generation, by ``generation_config.json``.
        shapes: of tensors by name, as far as headers show them.
    """

    folder: Path
    config: dict[str, Any]
    tokenizer: str
    end_tokens: Any
    shapes: dict[str, tuple[int, ...]]

    @classmethod
    def read(cls, folder: Path) -> ModelDescription:
        """Read the folder. Raises ``ModelLoadError`` if a file cannot be read."""
        is_plain = declared_quantization(folder) is None
        return cls(
            folder,
            _without_files(_json(folder / CONFIG_FILE) or {}),
            _tokenizer_digest(folder),
            (_json(folder / _GENERATION_FILE) or {}).get("eos_token_id"),
            {tensor.name: tensor.shape for tensor in tensors_of(folder)} if is_plain else {},
        )

    def _has_tokenizer_of(self, other: ModelDescription) -> bool:
        """Whether both tokenizers are equal. Parsing takes a second for a large one, so text is compared first."""
        if self.tokenizer == other.tokenizer:
            return True
        if _tokenizer_digest(self.folder) != self.tokenizer:
            return False
        ours, theirs = (_json(each.folder / TOKENIZER_FILE) for each in (self, other))
        return ours == theirs

    def check_fits(self, other: ModelDescription, folder: Path) -> None:
        """Raise ``ModelLoadError`` unless ``other``, of ``folder``, is a model of the same form; the message names the
        difference.
        """
        for field in sorted(self.config.keys() | other.config.keys()):
            ours, theirs = self.config.get(field), other.config.get(field)
            if ours != theirs:
                raise _misfit(folder, f"{field} is {shown(theirs)} in its {CONFIG_FILE}, and {shown(ours)} here")
        if self.tokenizer and other.tokenizer and not self._has_tokenizer_of(other):
            raise _misfit(folder, f"its {TOKENIZER_FILE} is another one")
        if self.end_tokens != other.end_tokens:
            fact = f"eos_token_id is {shown(other.end_tokens)} in its {_GENERATION_FILE}, and {shown(self.end_tokens)}"
            raise _misfit(folder, f"{fact} here")
        for name, shape in other.shapes.items():
            if self.shapes.get(name, shape) != shape:
                raise _misfit(folder, f"{name} is {list(shape)} there, and {list(self.shapes[name])} here")


def _tokenizer_digest(folder: Path) -> str:
    content = _read_file(folder / TOKENIZER_FILE)
    return "" if content is None else hashlib.sha256(_without_spaces(folder / TOKENIZER_FILE, content)).hexdigest()


def _without_spaces(file: Path, content: bytes) -> bytes:
    try:
        return msgspec.json.format(content, indent=-1)
    except msgspec.DecodeError as error:
        raise ModelLoadError(f"{file} cannot be read: {error}") from error


def _misfit(folder: Path, reason: str) -> ModelLoadError:
    return ModelLoadError(
        f"the weights in {folder} are not of the model that is served: {reason}; "
        "start an engine with that folder instead"
    )


def _without_files(config: dict[str, Any]) -> dict[str, Any]:
    """Return ``config`` without fields that do not affect the computation, at any depth."""
    return {
        key: _without_files(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key not in _OF_THE_FILES
    }


def _json(file: Path) -> Any:
    content = _read_file(file)
    try:
        return None if content is None else msgspec.json.decode(content)
    except msgspec.DecodeError as error:
        raise ModelLoadError(f"{file} cannot be read: {error}") from error


def _read_file(file: Path) -> bytes | None:
    try:
        return file.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ModelLoadError(f"{file} cannot be read: {error}") from error


def save_sharded_state(
    model: LoadedModel,
    read_state: Callable[[Path], dict[str, Tensor]],
    folders: Sequence[Path],
    call: SaveShardedState,
) -> ShardedStateSaved:
    """Write weights, index, and the other files of ``folders`` that a model folder needs, into ``call.path``.

    The index is written last, because the folder cannot be loaded without it.

    Args:
        read_state: returns all weights by the names of the checkpoint. It may write into its argument, the folder of
            the call, and leaves nothing there.
        folders: of the tokenizer and of the model; of files with one name the last one is written.

    Raises:
        EngineStateError: the path is no empty folder, or is not writable; or the weights in memory are rounded, so that
            another engine would round them again.
        ModelLoadError: the model has another form than its configuration by now.
    """
    if model.quantization is not None and not has_file_numbers(model.network):
        raise EngineStateError(
            f"the engine holds its weights in {model.quantization} alone, and what is rounded twice gives other "
            "tokens; save them from an engine that was started without --quantization"
        )
    target = Path(call.path)
    try:
        target.mkdir(parents=True, exist_ok=True)
        if any(target.iterdir()):
            raise EngineStateError(f"the folder {target} is not empty, and nothing is overwritten; choose another path")
        shards = _cut(read_state(target), call.max_size)
        _copy_companions(folders, target, str(model.dtype).removeprefix("torch."))
        files = [call.shard_name(part) for part in range(len(shards))]
        for name, tensors in zip(files, shards, strict=True):
            save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, target / name, {"format": "pt"})
        _write_index(target, dict(zip(files, shards, strict=True)))
    except (OSError, SafetensorError) as error:  # a full disk raises either, depending on the writer
        raise EngineStateError(f"the weights cannot be written to {target}: {error}") from error
    return ShardedStateSaved(str(target), files, sum((target / name).stat().st_size for name in files))


def _cut(state: dict[str, Tensor], max_size: int | None) -> list[dict[str, Tensor]]:
    """Split tensors in order into files of at most ``max_size`` bytes, at least one tensor each."""
    if not state:
        raise ModelLoadError("the model has no weights to save")
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in state.items():
        num_bytes = tensor.numel() * tensor.itemsize
        if shards[-1] and max_size is not None and size + num_bytes > max_size:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += num_bytes
    return shards


def _copy_companions(sources: Sequence[Path], target: Path, dtype: str) -> None:
    for source in sources:
        for path in sorted(source.iterdir()):
            if path.is_file() and not path.name.endswith(_WEIGHT_SUFFIXES) and path.name not in COMPANION_FILES:
                shutil.copyfile(path, target / path.name)
    # The engine may use another dtype than the files had; "auto" must find the saved one.
    config = json.loads((target / CONFIG_FILE).read_text())
    config |= {field: dtype for field in _DTYPE_FIELDS if field in config}
    # Saved weights are not quantized, whatever they were read from.
    for part in (config, config.get("text_config") or {}):
        for field in QUANTIZATION_FIELDS:
            part.pop(field, None)
    (target / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")


def _write_index(target: Path, files: dict[str, dict[str, Tensor]]) -> None:
    weight_map = {name: file for file, tensors in files.items() for name in tensors}
    num_bytes = sum(tensor.numel() * tensor.itemsize for tensors in files.values() for tensor in tensors.values())
    index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
    (target / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
