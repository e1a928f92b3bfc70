"""Cards of models that no worker has loaded yet, made from their files in a child process without torch.

Clients can then enqueue for such a model, and lists show it. Its first load replaces the card.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from ...shared.deployment.records import ModelCard
from ...shared.errors import ConfigurationError, ModelLoadError
from ...shared.params.kinds import GENERATE, POOLING_TASKS
from ...shared.process.log import add_log_arguments, configure_logging, log_options
from ...shared.values.cache_folder import cache_folder
from ..config.engine_config import EngineConfig
from ..models.checkpoint.folder import TOKENIZER_FILE, check_local_model
from ..models.formats.declared import CONFIG_FILE, SUFFIX, declares_pooling
from ..models.formats.headers import has_safetensors
from ..models.formats.sizes import folder_bytes
from ..models.gguf.architectures import find_family
from ..models.gguf.container import open_gguf
from ..models.gguf.folder import gguf_folder
from ..models.gguf.sizes import weight_bytes as gguf_weight_bytes
from ..text.tokenizer import TextCodec

_LENGTH_FIELDS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
_COMMAND = (sys.executable, "-m", "penstock.worker.keeper.cards")
# A GGUF file of a large vocabulary takes seconds.
_TIMEOUT_S = 300.0


class CardReply(msgspec.Struct):
    """The card of a model; or, if its files give none, one with its name and the reason.

    Args:
        weight_bytes: estimated bytes of its weights in memory; 0 if they are unknown.
    """

    card: ModelCard
    problem: str = ""
    weight_bytes: int = 0


def read_cards(configs: Sequence[EngineConfig]) -> list[CardReply]:
    """Return the card of each model according to its files, in order.

    Raises:
        ConfigurationError: the child process failed.
    """
    try:
        result = subprocess.run(
            (*_COMMAND, *log_options()),
            input=msgspec.json.encode(configs),
            stdout=subprocess.PIPE,
            timeout=_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigurationError(f"the files of the models cannot be read: {error}") from error
    return msgspec.json.decode(result.stdout, type=list[CardReply])


def card_of(config: EngineConfig) -> ModelCard:
    """Return the card of a model by its files; one with its name alone for a model on the hub.

    Raises:
        ModelLoadError: a file is missing or damaged.
    """
    path = check_local_model(config.model, needs_weights=config.needs_weights)
    if path is None:
        return ModelCard(model=config.model_name)
    folder = path if path.is_dir() else gguf_folder(path, cache_folder())
    settings = _read_json(folder / CONFIG_FILE)
    text = settings.get("text_config") or settings
    architecture = _architecture(settings)
    pools = _pools(config, folder, architecture)
    card = ModelCard(
        model=config.model_name,
        architecture=architecture,
        max_model_len=config.max_model_len or _length(text) or _length(settings),
        vocab_size=int(text.get("vocab_size") or 0),
        # Until it is loaded, nothing but its workers knows which of these it serves.
        supported_tasks=POOLING_TASKS if pools else (GENERATE,),
    )
    if (folder / TOKENIZER_FILE).is_file():
        codec = TextCodec.load(folder)
        card.has_chat_template = codec.has_chat_template
        card.tool_call_parser, card.reasoning_parser = (
            codec.chat_style.tool_call_parser,
            codec.chat_style.reasoning_parser,
        )
        card.system_anywhere = codec.has_chat_template and codec.roles.system_anywhere
        card.takes_developer = codec.roles.developer
    return card


def weight_bytes_of(config: EngineConfig) -> int:
    """Return the estimated bytes of a model's weights in memory; 0 without files.

    Of files of torch, which have no header, it is their size.

    Raises:
        ModelLoadError: a file is missing or damaged.
    """
    path = check_local_model(config.model, needs_weights=config.needs_weights)
    if path is None or not config.needs_weights:
        return 0
    has_packed_head = config.device == "cpu"
    if path.suffix == SUFFIX:
        file = open_gguf(path)
        dtype = str(find_family(file).config()["dtype"]) if config.dtype == "auto" else config.dtype
        return gguf_weight_bytes(
            file,
            dtype,
            config.quantization,
            takes_numbers=config.takes_file_numbers,
            has_packed_head=has_packed_head,
        )
    if not has_safetensors(path):
        return sum(each.stat().st_size for each in path.glob("*.bin") if each.is_file())
    return folder_bytes(
        path,
        config.dtype,
        config.quantization,
        takes_numbers=config.takes_file_numbers,
        has_packed_head=has_packed_head and not _pools(config, path, _architecture(_read_json(path / CONFIG_FILE))),
    )


def _pools(config: EngineConfig, folder: Path, architecture: str) -> bool:
    return config.runner == "pooling" or (config.runner == "auto" and declares_pooling(folder, architecture))


def _architecture(settings: dict[str, Any]) -> str:
    return (settings.get("architectures") or [""])[0]


def _length(settings: dict[str, Any]) -> int:
    return next((settings[name] for name in _LENGTH_FIELDS if isinstance(settings.get(name), int)), 0)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}; fetch the model again") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path} is no JSON object; fetch the model again")
    return content


def _reply_to(config: EngineConfig) -> CardReply:
    try:
        return CardReply(card_of(config), weight_bytes=weight_bytes_of(config))
    except (ModelLoadError, OSError) as error:
        return CardReply(ModelCard(model=config.model_name), str(error))


def write_replies(argv: Sequence[str]) -> None:
    """Read configurations from standard input, and write the replies to standard output. The log has standard error."""
    parser = argparse.ArgumentParser()
    add_log_arguments(parser)
    options = parser.parse_args(argv)
    configure_logging(options.log_level, options.log_format)
    configs = msgspec.json.decode(sys.stdin.buffer.read(), type=list[EngineConfig])
    sys.stdout.buffer.write(msgspec.json.encode([_reply_to(config) for config in configs]))


if __name__ == "__main__":
    write_replies(sys.argv[1:])
