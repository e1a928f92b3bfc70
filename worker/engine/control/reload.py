"""Replaces the loaded weights with those of another folder, or restores the former ones.

    folder checked ▶ KV cache freed ▶ loaded, checked, packed next to the old ▶ swapped ▶ tried ▶ served
           │                                  │                                   │
        refused                    refused, cache allocated again       the old restored, or the core ends

Nothing runs meanwhile; the worker process ensures that (``worker/serving/calls/reload.py``).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog

from ....shared.control.model import ReloadWeights, WeightsReloaded
from ....shared.errors import EngineCallError, EngineStateError, ModelLoadError
from ...config.engine_config import EngineConfig
from ...models.checkpoint.folder import TOKENIZER_FILE, resolve_model_folder
from ...models.loaded import LoadedModel
from ...models.weights.movable import Exchange
from ...models.weights.stored_files import ModelDescription, weights_version
from ..core.engine_core import EngineCore
from .sleep import Sleepable

log = structlog.get_logger(__name__)


class WeightsLostError(BaseException):
    """Neither the new nor the old weights can be used, so the engine must end. No call answers it."""


@dataclass
class WeightsSource:
    """The source of the loaded weights.

    Args:
        folder: the model's folder.
        tokenizer_folder: contains ``tokenizer.json``; mostly the same folder.
        version: a digest of the weights, or their name.
        description: the folder at the time of loading.
    """

    folder: Path
    tokenizer_folder: Path
    version: str
    description: ModelDescription

    @classmethod
    def of(cls, config: EngineConfig, folder: Path, tokenizer_folder: Path) -> WeightsSource:
        """Read the version and the description of the folder that an engine is started with.

        Raises:
            ModelLoadError: a file cannot be read.
        """
        version = weights_version(folder) if config.needs_weights else f"random-{config.seed}"
        return cls(folder, tokenizer_folder, version, ModelDescription.read(folder))

    def replace(self, folder: Path, version: str, description: ModelDescription) -> None:
        """Record that the weights come from ``folder`` now, and the tokenizer, too, if it came from the same folder."""
        if self.tokenizer_folder == self.folder and (folder / TOKENIZER_FILE).is_file():
            self.tokenizer_folder = folder
        self.folder, self.version, self.description = folder, version, description


class WeightsReload:
    """Replaces the weights of a running engine; see the module.

    Args:
        exchange: replaces the weights on all ranks.
        cache: the KV cache.
        settle: called after a swap, when the cache is allocated again; captures graphs.
        refit: called before the cache is allocated; fits values that depend on the weights.
        try_out: compute one token.
    """

    def __init__(
        self,
        config: EngineConfig,
        source: WeightsSource,
        model: LoadedModel,
        core: EngineCore,
        exchange: Exchange,
        cache: Sleepable,
        refit: Callable[[], None],
        settle: Callable[[], None],
        try_out: Callable[[], None],
    ) -> None:
        self._config = config
        self.source = source
        self._model = model
        self._core = core
        self._exchange = exchange
        self._cache = cache
        self._refit = refit
        self._settle = settle
        self._try_out = try_out

    def reload(self, call: ReloadWeights) -> WeightsReloaded:
        """Replace the weights, or only check the folder.

        Raises:
            EngineStateError: the engine holds requests, or its model is of a kind whose weights cannot be changed.
            ModelLoadError: the folder holds no such model; nothing was changed.
            EngineCallError: the new weights could not be used; the old ones are back.
            WeightsLostError: nor could the old ones.
        """
        folder, description = self._checked(call)
        version = call.version or weights_version(folder)
        former = self.source.version
        if call.only_check:
            return WeightsReloaded(path=str(folder), version=version, former_version=former)
        core = self._core
        if core.has_work or not core.forget_blocks():
            raise EngineStateError(f"weights cannot change while requests run ({core.num_unfinished_requests})")
        started = time.monotonic()
        self._change(folder)
        # Drop features of images, because they were computed with the former weights.
        core.images.forget_encoded()
        self.source.replace(folder, version, description)
        took_s = time.monotonic() - started
        log.info(
            "weights_reloaded", folder=str(folder), version=version, former_version=former, took_s=round(took_s, 2)
        )
        return WeightsReloaded(path=str(folder), version=version, former_version=former, load_time_s=took_s)

    def _checked(self, call: ReloadWeights) -> tuple[Path, ModelDescription]:
        """Return the folder of the call and its description; raise as ``reload`` before anything is changed."""
        if not self._config.needs_weights:
            raise EngineStateError("the engine was started with load_format dummy, and reads no weights")
        if self._config.nnodes > 1:
            raise EngineStateError("the weights of an engine over several hosts stay: start them with the other folder")
        if self._model.pooling is not None:
            raise EngineStateError("the weights of a model that pools stay: start an engine with the other folder")
        folder = resolve_model_folder(call.path) if call.path else self.source.folder
        if not folder.is_dir():
            raise ModelLoadError(f"model folder {folder} does not exist")
        description = ModelDescription.read(folder)
        self.source.description.check_fits(description, folder)
        return folder, description

    def _change(self, folder: Path) -> None:
        # Free the cache, because its memory holds the new weights until the old ones are released.
        self._cache.release(1)
        try:
            self._exchange.exchange(folder)
        except Exception:
            self._go_back(has_changed=False)
            raise
        try:
            self._begin()
        except Exception as error:
            log.exception("weights_not_usable", folder=str(folder))
            self._go_back(has_changed=True)
            raise EngineCallError(
                f"the weights in {folder} cannot be used, the former ones serve on: {type(error).__name__}: {error}"
            ) from error
        self._exchange.keep()

    def _go_back(self, *, has_changed: bool) -> None:
        """Use the former weights again, which may still be in place."""
        try:
            if has_changed:
                self._cache.release(1)
                self._exchange.put_back()
            self._begin()
        except BaseException as error:
            raise WeightsLostError("neither the new weights nor the former ones can be used") from error

    def _begin(self) -> None:
        """Prepare to compute with the weights that are in place, and compute one token."""
        self._refit()
        # Not in inference mode, as at the start, because not only steps write to a cache.
        self._cache.restore()
        self._settle()
        self._try_out()
