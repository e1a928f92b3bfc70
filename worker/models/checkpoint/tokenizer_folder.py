"""The tokenizer of a model as transformers reads it, in a form that needs no transformers.

``tokenizer.json`` alone is not enough: a tokenizer class has its own defaults and steps, and other files have tokens
and templates. So the core lets AutoTokenizer read the folder, and writes the result into the cache, once per content of
those files.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

import structlog
from tokenizers import Tokenizer

from ....shared.errors import ModelLoadError
from ....shared.values.cache_folder import cache_folder
from .folder import CONFIG_FILE, TOKENIZER_FILE

_TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
_GENERATION_CONFIG_FILE = "generation_config.json"
# Of processors from before chat_template.jinja existed.
_CHAT_TEMPLATE_FILE = "chat_template.json"
# Suffixes of files that tokenizers consist of. Weights are never read here.
_SUFFIXES = frozenset({".json", ".txt", ".model", ".jinja", ".py", ".tiktoken"})
# Version of the written files; a newer release does not use those of an older one.
_VERSION = 1

log = structlog.get_logger(__name__)


def tokenizer_folder(folder: Path, trust_remote_code: bool) -> Path:
    """Return a folder whose ``tokenizer.json`` tokenizes as AutoTokenizer does for ``folder``.

    That is ``folder`` itself if it was created from a GGUF file, or if it has a ``tokenizer.json`` without a
    ``tokenizer_config.json``, since no class is named then. It is also returned, with a warning, if AutoTokenizer
    fails.

    Raises:
        ModelLoadError: there is no ``tokenizer.json``, and none can be created.
    """
    has_file = (folder / TOKENIZER_FILE).is_file()
    if has_file and (not (folder / _TOKENIZER_CONFIG_FILE).is_file() or _is_of_gguf(folder)):
        return folder
    target = cache_folder() / "tokenizers" / _identity(folder, trust_remote_code)
    if (target / TOKENIZER_FILE).is_file():
        return target
    try:
        contents = _convert(folder, trust_remote_code)
    except Exception as error:  # the conversion raises any exception, from ImportError to Exception
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if has_file:
            log.warning("tokenizer_not_converted", folder=str(folder), reason=reason)
            return folder
        raise ModelLoadError(
            f"model folder {folder} lacks {TOKENIZER_FILE}, and none can be made of its other files: {reason}; "
            "install what transformers reads them with (sentencepiece and protobuf for tokenizer.model, or tiktoken), "
            "or make one elsewhere by AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        ) from error
    target = _write_files(target, contents)
    log.info("tokenizer_converted", source=str(folder), target=str(target))
    return target


def _convert(folder: Path, trust_remote_code: bool) -> dict[str, str]:
    """Return the files of the tokenizer that AutoTokenizer creates for ``folder``. Raises anything."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    backend: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"{type(tokenizer).__name__} is written in Python, and has no form for the tokenizers library")
    if (folder / TOKENIZER_FILE).is_file() and not _is_same_kind(backend, folder):
        # As in transformers for Llama, whose class is for SentencePiece and does not fit the vocabulary of the file.
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    whole = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    whole.no_truncation()
    whole.no_padding()
    config = {**tokenizer.special_tokens_map, "chat_template": _chat_template(folder, tokenizer)}
    contents = {TOKENIZER_FILE: whole.to_str(), _TOKENIZER_CONFIG_FILE: json.dumps(config, indent=2)}
    if (folder / _GENERATION_CONFIG_FILE).is_file():
        contents[_GENERATION_CONFIG_FILE] = (folder / _GENERATION_CONFIG_FILE).read_text()
    return contents


def _chat_template(folder: Path, tokenizer: Any) -> Any:
    """Return the template of the folder's processor, else of its tokenizer, in the form of
    ``tokenizer_config.json``.
    """
    path = folder / _CHAT_TEMPLATE_FILE
    template = json.loads(path.read_text())["chat_template"] if path.is_file() else tokenizer.chat_template
    if isinstance(template, dict):
        return [{"name": name, "template": source} for name, source in template.items()]
    return template


def _is_same_kind(backend: Tokenizer, folder: Path) -> bool:
    """Whether a class of transformers has left the model and the alphabet of ``tokenizer.json`` unchanged."""
    in_file = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
    return type(in_file.model) is type(backend.model) and _is_byte_level(in_file) == _is_byte_level(backend)


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    return tokenizer.decoder is not None and b'"ByteLevel"' in tokenizer.decoder.__getstate__()


def _is_of_gguf(folder: Path) -> bool:
    """Whether the folder was created from a GGUF file, whose tokenizer needs no class."""
    config = json.loads((folder / CONFIG_FILE).read_text()) if (folder / CONFIG_FILE).is_file() else {}
    return (config.get("quantization_config") or {}).get("quant_method") == "gguf"


def _identity(folder: Path, trust_remote_code: bool) -> str:
    """Return a digest of everything that determines a tokenizer: files, and the versions that read them."""
    versions = [metadata.version(name) for name in ("transformers", "tokenizers")]
    digest = hashlib.sha256(repr((_VERSION, versions, trust_remote_code)).encode())
    for path in sorted((*folder.glob("*"), *folder.glob("additional_chat_templates/*"))):
        if path.suffix in _SUFFIXES and not path.name.endswith(".index.json") and path.is_file():
            digest.update(repr((path.relative_to(folder).as_posix(), path.stat().st_size)).encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _write_files(target: Path, contents: dict[str, str]) -> Path:
    """Write the files into ``target``, or into a temporary folder if the cache is read-only; return the folder.

    Raises:
        ModelLoadError: neither is writable.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=target.parent))
    except OSError:
        temporary = target = _temporary_folder()
    for name, content in contents.items():
        (temporary / name).write_text(content)
    if temporary != target:
        try:
            temporary.rename(target)
        except OSError:  # another engine of this host was faster, and wrote the same files
            shutil.rmtree(temporary, ignore_errors=True)
    return target


def _temporary_folder() -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix="penstock-tokenizer-"))
    except OSError as error:
        raise ModelLoadError(
            f"the model's tokenizer cannot be written to {cache_folder()}: {error.strerror or error}; set "
            "XDG_CACHE_HOME to a folder that can be written to"
        ) from error
