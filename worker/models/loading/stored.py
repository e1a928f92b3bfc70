"""Structure and reference results of a model, stored in the cache at its first load.

A first load runs transformers' module of the model: it reads the structure from it, and compares the decoder with its
results. That takes most of the time of a start, and so does the import of transformers. A later load creates the
decoder from the stored structure and the model's files, and compares it with the stored results. So a stored structure
that does not fit the files, the compiled kernels or the processor is noticed, and the model is loaded from the
beginning. What is stored is used only by the same code on the same kind of processor.

Only a model whose decoder runs in one call of the compiled library (``lean/native.py``) is stored. Weights whose
packing takes time are stored, too (``packed_weights.py``).
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import structlog
import torch
from torch import Tensor, nn

from ....kernels import native
from ....kernels.huge_pages import Arena
from ....shared.errors import ModelLoadError
from ....shared.process.processor import this_processor
from ...config.engine_config import EngineConfig
from ...processes.host import usable_cores
from ..attention.call import AttentionCall, CacheFormat
from ..checkpoint.quantized import open_tensors
from ..checkpoint.stored_path import packed_path, stored_path
from ..checkpoint.tokenizer_folder import tokenizer_folder
from ..checks.conformance import ReferenceRun
from ..checks.lengths import LoweredReference
from ..checks.references import References
from ..checks.row_independence import is_row_independent
from ..formats.tensors import Readable, Unpacked
from ..forward import Forward, ForwardSettings
from ..lean.forward import LeanForward
from ..lean.layers.decoder import LeanDecoder
from ..lean.layers.layer import AnyLayer
from ..lean.native import NativeForward
from ..loaded import LoadedModel
from ..placing.device import return_free_memory
from ..placing.packed_linear import pack_linear_layers
from ..plan import AnglesPlan, DecoderPlan, LayerPlan
from .cache_files import newest_first, replace_file
from .file_module import Angles, AnglesKind, FileModule
from .packed_weights import PackedWeights, write_packed_weights
from .preparing import prepare, prepared_tolerance, weight_format

_PACKAGE = Path(__file__).parents[3]
# Folders whose code determines what is stored, and how it is used.
_CODE = ("kernels", "worker/models")
_SUFFIXES = (".py", ".cpp", ".h", ".txt")
# Positions whose angles are compared besides the last one.
_COMPARED_POSITIONS = 64
# The largest vocabularies take 27 MB a file.
_MAX_FILES = 32
# Each of them holds a layer in 16 bits or more.
_MAX_THREADS = 4

log = structlog.get_logger(__name__)


class StoredCall(msgspec.Struct, frozen=True):
    """An ``AttentionCall`` without its caches."""

    key_shape: tuple[int, int]
    value_shape: tuple[int, int]
    window: int | None


class StoredLowered(msgspec.Struct, frozen=True):
    """A ``LoweredReference``, whose logits are like those of ``StoredModel``."""

    logits: list[bytes]
    windows: list[int | None] | None
    longest: int


class StoredModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model as it was loaded by transformers.

    Args:
        build: digest of the code, the versions of libraries and the processor.
        refusal: why it cannot be loaded from this; "" if it can.
        angles: for each of ``plan.angles``.
        logits: of the sequences of ``ReferenceRun``, float32 ``[len, vocab_size]`` each.
        lowered: None if no request is affected by a length.

    The others are those of ``LoadedModel``.
    """

    build: str
    refusal: str = ""
    architecture: str
    dtype: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    num_parameters: int
    image_refusal: str
    attention_backend: str
    plan: DecoderPlan
    calls: list[StoredCall]
    angles: list[AnglesKind]
    logits: list[bytes]
    lowered: StoredLowered | None

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


def load_stored(config: EngineConfig, folder: Path) -> LoadedModel | None:
    """Load the model in ``folder`` from what an earlier load has stored; None if there is nothing that fits.

    A model that gives other results than stored is loaded from the beginning from then on, until its files or the code
    change.
    """
    path = stored_path(config, folder)
    stored = None if path is None else _read_usable(path)
    if path is None or stored is None:
        return None
    packed = _packed_network(stored, config, folder)
    if packed is None and config.has_four_bit_weights:
        return None
    try:
        return _load_from(stored, config, folder, packed)
    except ModelLoadError as error:
        log.warning("stored_model_refused", folder=str(folder), reason=str(error))
        _write_stored(path, msgspec.structs.replace(stored, refusal=str(error)))
        return None


def store_model(config: EngineConfig, folder: Path, model: LoadedModel, references: References) -> None:
    """Store the structure of a loaded model, if it can be loaded from it."""
    path = stored_path(config, folder)
    forward = model.forward
    if path is None or not isinstance(forward, NativeForward):
        return
    if model.vision is not None or model.pooling is not None or model.groups is not None or model.num_experts:
        return
    build, lean = _build_digest(), forward.lean
    try:
        angles = [_angles_of(lean, plan) for plan in lean.network.plan.angles]
        shapes = _shapes_of(open_tensors(folder, model.dtype))
        # Raises if transformers renames or joins tensors of the files.
        _empty_network(shapes, lean.network.plan, model.dtype, angles)
    except ModelLoadError as error:
        log.debug("model_not_stored", folder=str(folder), reason=str(error))
        return
    _store_packed(config, folder, build, lean.network, shapes)
    if _read_stored(path, build) is not None:
        return
    lowered = references.lowered
    _write_stored(
        path,
        StoredModel(
            build=build,
            architecture=model.architecture,
            dtype=str(model.dtype).removeprefix("torch."),
            max_model_len=model.max_model_len,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            num_parameters=model.num_parameters,
            image_refusal=model.image_refusal,
            attention_backend=model.attention_backend,
            plan=lean.network.plan,
            calls=[StoredCall(call.key_shape, call.value_shape, call.window) for call in lean.attention_calls],
            angles=angles,
            logits=_bytes_of(references.run),
            lowered=None
            if lowered is None
            else StoredLowered(_bytes_of(lowered.reference), lowered.windows, lowered.longest),
        ),
    )


def _packed_network(stored: StoredModel, config: EngineConfig, folder: Path) -> LeanDecoder | None:
    """Return the decoder with packed weights of an earlier load; None if there are none that can be used."""
    path = packed_path(config, folder)
    if path is None or not path.is_file():
        return None
    try:
        weights = PackedWeights(path, stored.build)
        network = _empty_network(weights.shapes, stored.plan, stored.torch_dtype, stored.angles)
        weights.give_weights(network)
        os.utime(path)  # the files that were not used for the longest time are removed first
    except (ModelLoadError, OSError) as error:
        log.warning("packed_weights_refused", reason=str(error))
        path.unlink(missing_ok=True)
        return None
    return network


def _store_packed(
    config: EngineConfig, folder: Path, build: str, network: LeanDecoder, shapes: Mapping[str, Sequence[int]]
) -> None:
    """Store the weights of ``network``, unless they are stored already, and use the stored embeddings."""
    path = packed_path(config, folder)
    if path is None:
        return
    try:
        weights = PackedWeights(path, build)
    except ModelLoadError:
        if not write_packed_weights(path, build, network, shapes):
            return
        weights = PackedWeights(path, build)
    weights.map_embeddings(network)


@torch.inference_mode()
def _load_from(stored: StoredModel, config: EngineConfig, folder: Path, packed: LeanDecoder | None) -> LoadedModel:
    """Load a model.

    Args:
        packed: its decoder, with all weights; None to read and pack them.

    Raises:
        ModelLoadError: it gives other results than stored.
    """
    settings = ForwardSettings(
        stored.max_model_len, config.deterministic, config.attention_backend, None, plan=stored.plan
    )
    network, shapes = packed, {}
    if network is None:
        with _torch_on_one_thread():
            tensors = open_tensors(folder, stored.torch_dtype)
            shapes = _shapes_of(tensors)
            takes = config.takes_file_numbers
            module = _module_of(tensors, stored.plan, stored.torch_dtype, stored.angles, takes_file_numbers=takes)
            network = LeanDecoder(module, stored.plan, partial(_map_layers, quantization=config.quantization))
    module = _module_of({}, stored.plan, stored.torch_dtype, stored.angles)
    lean: Forward = LeanForward(module, settings, network, _stored_calls(stored, module))
    forward = prepare(lean, config, module.device, stored.vocab_size, stored.max_model_len)
    if not isinstance(forward, NativeForward):
        raise ModelLoadError("the compiled library cannot compute it any more")
    _references_of(stored, settings).compare_with(forward, prepared_tolerance(config, network))
    if packed is None:
        _store_packed(config, folder, stored.build, network, shapes)
    return_free_memory()
    return LoadedModel(
        forward=forward,
        folder=tokenizer_folder(folder, config.trust_remote_code),
        architecture=stored.architecture,
        max_model_len=stored.max_model_len,
        is_length_chosen=config.max_model_len is not None,
        vocab_size=stored.vocab_size,
        eos_token_ids=stored.eos_token_ids,
        num_parameters=stored.num_parameters,
        attention_backend=stored.attention_backend,
        image_refusal=stored.image_refusal,
        quantization=weight_format(config, folder, network),
        is_row_independent=is_row_independent(forward, stored.attention_backend),
    )


def _map_layers(
    make: Callable[[LayerPlan], AnyLayer], plans: Sequence[LayerPlan], quantization: str | None
) -> list[AnyLayer]:
    """Create and pack all layers, some at the same time."""
    arenas: dict[int, Arena] = {}

    @torch.inference_mode()
    def make_packed(plan: LayerPlan) -> AnyLayer:
        layer = make(plan)
        arena = arenas.setdefault(threading.get_ident(), Arena())
        pack_linear_layers(layer, quantization, arena)
        return layer

    with ThreadPoolExecutor(min(usable_cores(), _MAX_THREADS)) as threads:
        return list(threads.map(make_packed, plans))


@contextmanager
def _torch_on_one_thread() -> Iterator[None]:
    """Let torch use one thread, because its waiting threads occupy cores: on a busy machine for ten times as long."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _stored_calls(stored: StoredModel, module: nn.Module) -> list[AttentionCall]:
    dtype = stored.torch_dtype
    return [
        AttentionCall(
            module,
            call.key_shape,
            call.value_shape,
            dtype,
            call.window,
            has_own_rule=False,
            cache_format=CacheFormat(dtype),
        )
        for call in stored.calls
    ]


def _references_of(stored: StoredModel, settings: ForwardSettings) -> References:
    run = ReferenceRun.stored(stored.logits, stored.vocab_size, stored.torch_dtype)
    if stored.lowered is None:
        return References(run, None)
    lowered = ReferenceRun.stored(stored.lowered.logits, stored.vocab_size, stored.torch_dtype)
    return References(run, LoweredReference(lowered, None, settings, stored.lowered.windows, stored.lowered.longest))


def _bytes_of(reference: ReferenceRun) -> list[bytes]:
    return [logits.float().contiguous().numpy().tobytes() for logits in reference.logits]


def _shapes_of(tensors: Readable) -> dict[str, tuple[int, ...]]:
    return {
        name: tuple(each.shape if isinstance(each, Unpacked) else each.get_shape()) for name, each in tensors.items()
    }


def _empty_network(
    shapes: Mapping[str, Sequence[int]], plan: DecoderPlan, dtype: torch.dtype, angles: list[AnglesKind]
) -> LeanDecoder:
    """Create the decoder of a model whose files have tensors of ``shapes``, without content.

    Raises:
        ModelLoadError: ``plan`` needs others.
    """
    empty = {name: torch.empty(tuple(shape), dtype=dtype, device="meta") for name, shape in shapes.items()}
    return LeanDecoder(_module_of(empty, plan, dtype, angles), plan)


def _module_of(
    tensors: Readable, plan: DecoderPlan, dtype: torch.dtype, angles: list[AnglesKind], **options: bool
) -> Any:
    return FileModule(tensors, plan, dtype, _angles_modules(plan, angles), **options)


def _angles_modules(whole: DecoderPlan, angles: list[AnglesKind]) -> dict[str, nn.Module]:
    kinds: dict[str, list[AnglesKind]] = {}
    for plan, kind in zip(whole.angles, angles, strict=True):
        kinds.setdefault(plan.name, []).append(kind)
    return {name: Angles(of_module) for name, of_module in kinds.items()}


def _angles_of(lean: LeanForward, plan: AnglesPlan) -> AnglesKind:
    """Return how the module of ``plan`` computes angles.

    Raises:
        ModelLoadError: they are not products of positions and frequencies.
    """
    network = lean.network
    module = dict(zip(dict.fromkeys(each.name for each in network.plan.angles), network.rotary_embs, strict=True))[
        plan.name
    ]
    last = lean.max_model_len - 1
    positions = torch.tensor(sorted({*range(min(_COMPARED_POSITIONS, last)), last // 2, last}))[None]

    def angles_by(source: nn.Module, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return source(torch.empty(0, dtype=dtype), positions, *plan.arguments, **dict(plan.options))

    theirs = [angles_by(module, dtype) for dtype in (torch.float32, torch.bfloat16)]
    factor = theirs[0][0][0, 0, 0].item()  # the cosine of position 0 is 1
    is_rounded = theirs[1][0].dtype is torch.bfloat16
    for (_, buffer), columns in itertools.product(module.named_buffers(), ("halves", "pairs", "single")):
        frequencies = buffer.detach().float().flatten().tolist()
        kind = AnglesKind(plan.arguments, plan.options, frequencies, factor, columns, is_rounded)
        ours = [angles_by(Angles([kind]), dtype) for dtype in (torch.float32, torch.bfloat16)]
        if all(map(torch.equal, itertools.chain(*ours), itertools.chain(*theirs))):
            return kind
    raise ModelLoadError("its angles are not products of positions and frequencies")


def _read_usable(path: Path) -> StoredModel | None:
    """Return the usable content of ``path``; None if there is none."""
    stored = _read_stored(path, _build_digest())
    return None if stored is None or stored.refusal else stored


def _read_stored(path: Path, build: str) -> StoredModel | None:
    """Return the content of ``path``, whether it can be used or not; None if it was not written by ``build``."""
    try:
        stored = msgspec.msgpack.decode(path.read_bytes(), type=StoredModel)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        log.debug("stored_model_unreadable", path=str(path), reason=str(error))
        return None
    return stored if stored.build == build else None


def _write_stored(path: Path, stored: StoredModel) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, [msgspec.msgpack.encode(stored)])
        for oldest in newest_first(path.parent, ".msgpack")[_MAX_FILES:]:
            oldest.unlink(missing_ok=True)
    except OSError as error:
        # The next start takes longer, and nothing else.
        log.warning("stored_model_not_written", path=str(path), reason=str(error))


def _build_digest() -> str:
    """Return a digest of the code, the versions of the libraries, and the processor."""
    library = native.loaded()
    digest = sha256(repr((torch.__version__, metadata.version("transformers"), this_processor())).encode())
    digest.update(("" if library is None else library.instructions).encode())
    for folder in _CODE:
        for path in _sources_of(_PACKAGE / folder):
            state = path.stat()
            digest.update(f"{path} {state.st_size} {state.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _sources_of(folder: Path) -> Sequence[Path]:
    return sorted(Path(root) / name for root, _, names in os.walk(folder) for name in names if name.endswith(_SUFFIXES))
