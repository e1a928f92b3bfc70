"""Wait for a server, detect its type, and check that its model matches the tokenizer of the core."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import structlog

from ....shared.errors import ConfigurationError, ModelLoadError
from ....shared.values.shown import mask_url
from . import llama, sglang
from .dialect import Dialect, ServerFacts
from .streams import client_options

# A model of many gigabytes takes minutes to load, so the wait is logged periodically.
LOG_INTERVAL_S = 30.0
_POLL_INTERVAL_S = 0.25
# A server whose core was killed takes some time to exit.
_OLD_SERVER_TIMEOUT_S = 10.0
_TIMEOUT_S = 30.0
_HEALTH_PATH = "/health"

log = structlog.get_logger(__name__)


def open_client(url: str) -> httpx.Client:
    """Return a client for the requests before a core is ready."""
    return httpx.Client(**client_options(url), timeout=_TIMEOUT_S)


def await_free_address(client: httpx.Client) -> None:
    """Wait until no server answers at the address at which a server will be started.

    Raises:
        ConfigurationError: a server continues to answer.
    """
    deadline = time.monotonic() + _OLD_SERVER_TIMEOUT_S
    while _status(client) is not None:
        if time.monotonic() > deadline:
            raise ConfigurationError(
                f"engine_command: a server answers at {_shown_url(client)} already; leave engine_command out to "
                "use it, or give both another port"
            )
        time.sleep(_POLL_INTERVAL_S)


def await_server(client: httpx.Client, ended: Callable[[], str | None]) -> None:
    """Wait without a limit until the server has loaded its model.

    Args:
        ended: returns how the server has ended, if it was started here and has ended.

    Raises:
        ModelLoadError: the server has ended.
    """
    log_at = time.monotonic() + LOG_INTERVAL_S
    while (status := _status(client)) is None or status == httpx.codes.SERVICE_UNAVAILABLE:
        if finding := ended():
            raise ModelLoadError(f"engine_command: {finding}")
        if time.monotonic() > log_at:
            log.warning("engine_server_awaited", url=_shown_url(client), status=status)
            log_at += LOG_INTERVAL_S
        time.sleep(_POLL_INTERVAL_S)


def find_server(client: httpx.Client) -> tuple[Dialect, ServerFacts]:
    """Detect the type of the server and read its properties.

    Raises:
        ConfigurationError: its type is unknown, or required properties are missing.
    """
    try:
        llama_status, props = _request(client, "/props")
        if props is not None and "total_slots" in props:
            facts = llama.facts_of(props, _request(client, "/v1/models")[1] or {})
            return llama.LlamaDialect(facts.max_model_len), facts
        sglang_status, model = _request(client, "/get_model_info", "/model_info")
        if model is not None and "model_path" in model:
            return sglang.SglangDialect(), sglang.facts_of(
                model, _request(client, "/get_server_info", "/server_info")[1] or {}
            )
    except httpx.HTTPError as error:
        raise ConfigurationError(f"engine_url {_shown_url(client)}: {type(error).__name__} {error}") from error
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ConfigurationError(
            f"engine_url {_shown_url(client)}: required properties of the server are missing: {error!r}; its version "
            "may be unknown to this engine"
        ) from error
    raise ConfigurationError(
        f"engine_url {_shown_url(client)}: the server is neither llama-server (its /props answers {llama_status}) nor "
        f"SGLang (its /get_model_info answers {sglang_status}); engine 'http' knows these two, without an API key"
    )


def _shown_url(client: httpx.Client) -> str:
    return mask_url(str(client.base_url))


def check_model(facts: ServerFacts, config: dict[str, Any], num_tokens: int, folder: Path) -> None:
    """Refuse a server that has another model.

    Args:
        config: the ``config.json`` of ``folder``.
        num_tokens: size of the folder's tokenizer. The vocabulary of the weights may be padded beyond it.

    Raises:
        ConfigurationError: the models differ; names the difference.
    """
    sizes = {num_tokens, vocab_size_of(config)} - {None}
    if facts.vocab_size is not None and facts.vocab_size not in sizes:
        raise ConfigurationError(
            f"the server's model ({facts.model}) has a vocabulary of {facts.vocab_size} tokens, and that of model "
            f"{folder} has {' or '.join(map(str, sorted(sizes, key=str)))}; give the folder of the server's model"
        )
    architectures = config.get("architectures") or []
    if facts.architecture and architectures and facts.architecture not in architectures:
        raise ConfigurationError(
            f"the server's model ({facts.model}) is a {facts.architecture}, and that of model {folder} a "
            f"{architectures[0]}; give the folder of the server's model"
        )


def vocab_size_of(config: dict[str, Any]) -> int | None:
    """Return the vocabulary size in a ``config.json``, which may have it in ``text_config``."""
    return config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")


def _status(client: httpx.Client) -> int | None:
    try:
        return client.get(_HEALTH_PATH).status_code
    except httpx.HTTPError:
        return None


def _request(client: httpx.Client, *paths: str) -> tuple[int, dict[str, Any] | None]:
    """Request ``paths``, which are names of one endpoint, until one returns an object.

    Returns the status of the last request, and the object; None if no path returned one.
    """
    status = 0
    for path in paths:
        response = client.get(path)
        status = response.status_code
        if status == httpx.codes.OK:
            try:
                content = response.json()
            except (json.JSONDecodeError, UnicodeDecodeError):
                continue
            if isinstance(content, dict):
                return status, content
    return status, None
