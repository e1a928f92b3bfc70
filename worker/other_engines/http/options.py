"""Options of ``worker start`` that apply to a core that uses a server; the others are refused."""

from __future__ import annotations

import shlex

from ....shared.errors import ConfigurationError
from ....shared.values.shown import shown
from ...config.checks import check_supported
from ...config.engine_config import EngineConfig

ENGINE = "http"
SUPPORTED_OPTIONS = frozenset(
    {
        "model",
        "served_model_name",
        "engine",
        "engine_url",
        "engine_command",
        "trust_remote_code",
        "num_engines_on_host",
        "max_model_len",
        "max_num_seqs",
    }
)
_SERVER_OPTIONS = ("dtype", "device", "num_threads", "quantization", "kv_cache_dtype", "kv_cache_memory")
_INSTEAD: dict[str, str] = dict.fromkeys(_SERVER_OPTIONS, "set it in the server's own options")


def check_options(config: EngineConfig) -> None:
    """Refuse options that do not apply.

    Raises:
        ConfigurationError: names the field and the remedy.
    """
    check_supported(config, ENGINE, SUPPORTED_OPTIONS, _INSTEAD)
    if config.num_engines_on_host > 1:
        raise ConfigurationError(
            f"engines must be 1 with engine 'http', got {config.num_engines_on_host}: they would share the slots of "
            "one server; run `worker start` once for each server"
        )
    command_words(config)


def command_words(config: EngineConfig) -> list[str]:
    """Return the words of ``engine_command``. Raises ``ConfigurationError`` if a quote in them does not end."""
    try:
        return shlex.split(config.engine_command)
    except ValueError as error:
        raise ConfigurationError(
            f"engine_command cannot be read: {error}, got {shown(config.engine_command)}"
        ) from None
