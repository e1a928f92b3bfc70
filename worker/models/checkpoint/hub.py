"""Fetch a model by its name on the hub into the hub's cache: a model folder, or the GGUF file of one type."""

from __future__ import annotations

import glob
import io
import re
import time
from pathlib import Path, PurePosixPath
from typing import Any

import structlog
from huggingface_hub import constants, get_cached_repo_tree, snapshot_download
from huggingface_hub.errors import (
    CachedRepoTreeNotFoundError,
    EntryNotFoundError,
    GatedRepoError,
    HFValidationError,
    HTTPError,  # pyright: ignore[reportPrivateImportUsage]  # its HTTP library differs between versions
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from tqdm.auto import tqdm

from ....shared.errors import ModelLoadError
from ..formats.declared import COMPANION_FILES, CONFIG_FILE, SUFFIX, declared_quantization

_SMALL_FILES = (".json", ".model", ".txt", ".jinja", ".py")
# The same weights in the formats of other programs.
_OTHER_FOLDERS = ("original", "onnx", "openvino", "coreml", "metal")
_OTHER_WEIGHTS = "consolidated"
# GGUF files that are no language model: image encoders, and the activations that a quantisation used.
_NO_MODEL = re.compile(r"(?:^|[-._])(?:mmproj|imatrix)(?:[-._]|$)", re.IGNORECASE)
_PART = re.compile(r"-\d{5}-of-\d{5}$")
_TYPE = re.compile(r"(?:^|[-._])((?:UD-)?(?:I?Q\d\w*|TQ\d_\d|B?F16|FP16|F32|MXFP4\w*|NVFP4))$", re.IGNORECASE)
_PROGRESS_INTERVAL_S = 10.0

log = structlog.get_logger(__name__)


def fetch_model(model: str) -> Path:
    """Return the folder of ``model`` in the hub's cache, or its GGUF file (the first if it is split).

    Files that the cache lacks are downloaded. Without a network, the cache alone is used.

    Args:
        model: name of a repository. A colon and a type may follow, to select a GGUF file.

    Raises:
        ModelLoadError: the hub has no such model or type, access is denied, the download failed, or the model has an
            unsupported quantization.
    """
    name, colon, kind = model.partition(":")
    if colon and not kind:
        raise ModelLoadError(f"model {model!r} names no type after its colon; give one such as {name}:Q4_K_M")
    try:
        return _fetch(name, kind)
    except ModelLoadError:
        raise
    except HFValidationError as error:
        raise ModelLoadError(
            f"model {model!r} is no local folder and no valid name on the model hub; give a folder, a {SUFFIX} file, "
            "or a name such as Qwen/Qwen3-0.6B"
        ) from error
    except GatedRepoError as error:  # a subclass of the next
        raise ModelLoadError(
            f"model {name!r} is gated; accept its terms at {constants.ENDPOINT}/{name}, and set HF_TOKEN to a token of "
            "that account"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelLoadError(
            f"model {name!r} is no local folder, and the model hub has none of this name; correct it, or set HF_TOKEN "
            "if the model is private"
        ) from error
    except LocalEntryNotFoundError as error:
        raise ModelLoadError(
            f"the model hub {constants.ENDPOINT} cannot be reached, and its cache {constants.HF_HUB_CACHE} lacks files "
            f"of model {name!r}; connect to the network without HF_HUB_OFFLINE, copy the model into the cache, or give "
            "a local folder"
        ) from error
    except (OSError, HTTPError, EntryNotFoundError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelLoadError(
            f"the download of model {name!r} failed: {reason}; start again, which keeps the complete files in "
            f"{constants.HF_HUB_CACHE}"
        ) from error


def choose_gguf(model: str, files: list[str], kind: str) -> list[str]:
    """Return the GGUF file of the type ``kind`` among ``files``, in all its parts.

    Args:
        model: for error messages.
        kind: type in any case, such as q4_k_m; "" if the repository has only one model.

    Raises:
        ModelLoadError: no file has this type, or several do; the message lists them.
    """
    models: dict[str, list[str]] = {}
    for file in sorted(files):
        stem = _PART.sub("", file.removesuffix(SUFFIX))
        if file.endswith(SUFFIX) and not _NO_MODEL.search(PurePosixPath(stem).name):
            models.setdefault(stem, []).append(file)
    kinds = {stem: _type_of(stem) for stem in models}
    matches = [stem for stem in models if not kind or kinds[stem].lower() == kind.lower()]
    if len(matches) == 1:
        return models[matches[0]]
    name = model.partition(":")[0]
    available = ", ".join(sorted(set(kinds.values())))
    if not models:
        raise ModelLoadError(f"model {name!r} has no {SUFFIX} file; give its name without a type")
    if not matches:
        raise ModelLoadError(f"model {name!r} has no {SUFFIX} file of the type {kind!r}; give one of {available}")
    if not kind and len(set(kinds.values())) > 1:
        raise ModelLoadError(
            f"model {name!r} has {SUFFIX} files of the types {available}; name one, such as {name}:{kinds[matches[0]]}"
        )
    raise ModelLoadError(
        f"model {model!r} fits several {SUFFIX} files: {', '.join(models[stem][0] for stem in matches)}; download one "
        "and give its path"
    )


def _fetch(name: str, kind: str) -> Path:
    # First the files that may show that the rest is not usable. This also lists the repository in the cache.
    folder = _snapshot(name, [CONFIG_FILE, *COMPANION_FILES])
    files = _list_files(name, folder)
    needed = _needed_files(files)
    has_weights = any(file.endswith((".safetensors", ".bin")) for file in needed)
    if kind or (not has_weights and any(file.endswith(SUFFIX) for file in files)):
        parts = choose_gguf(f"{name}:{kind}" if kind else name, files, kind)
        return _snapshot(name, parts) / parts[0]
    declared_quantization(folder)
    return _snapshot(name, needed)


def _snapshot(name: str, files: list[str]) -> Path:
    progress = _Progress(name)
    return Path(
        snapshot_download(name, allow_patterns=[glob.escape(file) for file in files], tqdm_class=progress.bar_class())
    )


def _list_files(name: str, folder: Path) -> list[str]:
    """Return the files of the repository, or those in the cache if an older library wrote it."""
    try:
        return [file.path for file in get_cached_repo_tree(name)]
    except CachedRepoTreeNotFoundError:
        return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]


def _needed_files(files: list[str]) -> list[str]:
    """Return the files that an engine reads: of weights in several formats only those in safetensors."""
    own = [file for file in files if file.partition("/")[0] not in _OTHER_FOLDERS or "/" not in file]
    own = [file for file in own if not PurePosixPath(file).name.startswith(_OTHER_WEIGHTS)]
    weights = [file for file in own if file.endswith(".safetensors")]
    if not weights:
        weights = [file for file in own if PurePosixPath(file).match("pytorch_model*.bin")]
    return weights + [file for file in own if file.endswith(_SMALL_FILES)]


def _type_of(stem: str) -> str:
    """Return the type at the end of a file's name, or the whole name if it has none."""
    match = _TYPE.search(PurePosixPath(stem).name)
    return match[1] if match else PurePosixPath(stem).name


class _Progress:
    """Progress of a download, written to the log at most every ten seconds: engines have no terminal."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._logged_at = time.monotonic()

    def bar_class(self) -> type[tqdm]:
        """Return a class of progress bars that report here."""
        progress = self

        class Bar(tqdm):
            """Bar without an output of its own."""

            monitor_interval = 0

            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **{**kwargs, "file": io.StringIO()})

            def display(self, msg: str | None = None, pos: int | None = None) -> None:
                if self.unit == "B" and self.total:
                    progress.report(int(self.n), int(self.total))

            def close(self) -> None:
                # It would report again, long after the download if the bar is closed as garbage.
                self.disable = True

        return Bar

    def report(self, num_bytes: int, total_bytes: int) -> None:
        now = time.monotonic()
        if now - self._logged_at >= _PROGRESS_INTERVAL_S:
            self._logged_at = now
            log.info("model_downloading", model=self._model, num_bytes=num_bytes, total_bytes=total_bytes)
