"""Build the core that uses a server, once the server is ready."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
from tokenizers import Tokenizer

from ....shared.errors import ConfigurationError, ModelLoadError
from ....shared.messages.core import Ready
from ....shared.messages.requests import GREEDY
from ...config.engine_config import EngineConfig
from ...core.answers import CallAnswers
from ...models.checkpoint.folder import CONFIG_FILE, TOKENIZER_FILE, resolve_model_folder
from ...models.checkpoint.tokenizer_folder import tokenizer_folder
from ...processes.progress import ProgressWriter
from .core import HttpCore, http_control
from .dialect import Dialect, ServerFacts
from .launcher import LaunchedServer
from .options import ENGINE, command_words
from .server import await_free_address, await_server, check_model, find_server, open_client, vocab_size_of
from .streams import ServerStreams

_GENERATION_CONFIG_FILE = "generation_config.json"

log = structlog.get_logger(__name__)


@dataclass
class HttpEngine:
    """Implementation of ``worker.core.interface.Engine``."""

    core: HttpCore
    control: CallAnswers
    ready: Ready
    streams: ServerStreams
    server: LaunchedServer | None

    def close(self) -> None:
        """Close the connections to the server, and end it if it was started here."""
        self.streams.close()
        if self.server is not None:
            self.server.close()


def build_engine(config: EngineConfig, progress: ProgressWriter) -> HttpEngine:
    """Detect or start the server, and wait until it is ready.

    Raises:
        ConfigurationError, ModelLoadError: the folder, the server or its model does not fit; names which.
    """
    # httpx logs a line for each request and health check.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    folder = resolve_model_folder(config.model, needs_weights=config.needs_weights)
    texts = tokenizer_folder(folder, config.trust_remote_code)
    words = command_words(config)
    with open_client(config.engine_url) as client:
        if words:
            await_free_address(client)
        server = LaunchedServer(words) if words else None
        await_server(client, server.ended if server is not None else lambda: None)
        dialect, facts = find_server(client)
    model_config, num_tokens = _json(folder / CONFIG_FILE), _num_tokens(texts)
    check_model(facts, model_config, num_tokens, folder)
    log.info("engine_server_found", server=dialect.name, version=facts.version, model=facts.model)
    ready = _ready(config, dialect, facts, model_config)
    ready.vocab_size = facts.vocab_size or vocab_size_of(model_config) or num_tokens
    ready.eos_token_ids = _eos_token_ids(folder, model_config)
    ready.model_folder = str(texts)
    streams = ServerStreams(config.engine_url, _exit_without_server)
    core = HttpCore(
        dialect,
        streams,
        max_model_len=ready.max_model_len,
        vocab_size=ready.vocab_size,
        eos_token_ids=ready.eos_token_ids,
        kv_cache_size_tokens=ready.kv_cache_size_tokens,
    )
    streams.watch(dialect.health_path)
    if server is not None:
        server.watch(_exit_without_server)
    return HttpEngine(core, http_control(core, facts.kv_cache_size_tokens, progress), ready, streams, server)


def _ready(config: EngineConfig, dialect: Dialect, facts: ServerFacts, model_config: dict[str, Any]) -> Ready:
    max_model_len = config.max_model_len or facts.max_model_len
    if max_model_len > facts.max_model_len:
        raise ConfigurationError(
            f"max_model_len {max_model_len}: {dialect.name} supports requests of at most {facts.max_model_len} tokens; "
            "start it with a longer context, or leave max_model_len out"
        )
    num_slots = min(config.max_num_seqs, facts.num_slots)
    return Ready(
        model_folder="",
        architecture=facts.architecture or (model_config.get("architectures") or [""])[0],
        max_model_len=max_model_len,
        num_blocks=facts.kv_cache_size_tokens // facts.block_size,
        block_size=facts.block_size,
        dtype="",
        device=config.device,
        vocab_size=0,
        eos_token_ids=[],
        max_num_seqs=num_slots,
        max_num_batched_tokens=config.token_budget,
        kv_cache_size_tokens=facts.kv_cache_size_tokens,
        attention_backend=dialect.name,
        engine=ENGINE,
        resume=GREEDY,
        versions={dialect.name: facts.version},
        enable_prefix_caching=True,
        structured_outputs_backend=dialect.name,
    )


def _num_tokens(folder: Path) -> int:
    path = folder / TOKENIZER_FILE
    try:
        return Tokenizer.from_file(str(path)).get_vocab_size()
    except Exception as error:  # the library raises bare Exception for a broken file
        raise ModelLoadError(f"{path} cannot be read: {error}") from error


def _eos_token_ids(folder: Path, config: dict[str, Any]) -> list[int]:
    """Return the end-of-sequence tokens of the generation config, or else of the model's config."""
    path = folder / _GENERATION_CONFIG_FILE
    token_ids = _json(path).get("eos_token_id") if path.is_file() else None
    token_ids = config.get("eos_token_id") if token_ids is None else token_ids
    return [token_ids] if isinstance(token_ids, int) else sorted(token_ids or ())


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    return content if isinstance(content, dict) else {}


def _exit_without_server(reason: str) -> None:
    """Exit immediately after the loss of the server, so that the worker process notices it."""
    log.error("engine_server_lost", reason=reason)
    os._exit(1)
