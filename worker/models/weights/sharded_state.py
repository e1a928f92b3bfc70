"""Write the weights in memory as safetensors files of a bounded size, into a folder that can be served."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ....shared.control.weights import SaveShardedState, ShardedStateSaved
from ....shared.errors import EngineStateError, ModelLoadError
from ..checkpoint.folder import CONFIG_FILE
from ..formats.declared import COMPANION_FILES, QUANTIZATION_FIELDS
from ..loaded import LoadedModel

INDEX_FILE = "model.safetensors.index.json"
# Suffixes of any weights, which are not copied. Other files are: configuration, tokenizer, chat template, code.
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".index.json")
_DTYPE_FIELDS = ("dtype", "torch_dtype")


def save_sharded_state(
    model: LoadedModel, read_state: Callable[[Path], dict[str, Tensor]], folder: Path, call: SaveShardedState
) -> ShardedStateSaved:
    """Write weights, index, and the other files of ``folder`` that a model folder needs, into ``call.path``.

    The index is written last, because the folder cannot be loaded without it.

    Args:
        read_state: returns all weights by the names of the checkpoint. It may write into its argument, the folder of
            the call, and leaves nothing there.

    Raises:
        EngineStateError: the path is no empty folder, or is not writable; or the weights in memory are rounded, so that
            another engine would round them again.
        ModelLoadError: the model has another form than its configuration by now.
    """
    if model.quantization is not None:
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
        _copy_companions([model.folder, folder], target, str(model.dtype).removeprefix("torch."))
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


def _copy_companions(sources: list[Path], target: Path, dtype: str) -> None:
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
