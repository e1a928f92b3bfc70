"""What guesses for an engine, or why nothing may."""

from __future__ import annotations

from ...shared.errors import ConfigurationError
from ..config.engine_config import EngineConfig
from ..models.loaded import LoadedModel
from .drafting.speculation import NoMemory, Speculation
from .drafting.suffix import SuffixMemory
from .execution.free_rows import measure_free_rows
from .execution.model_runner import ModelRunner
from .scheduling.guessing import Guessing, NoGuessing


def check_speculation(config: EngineConfig, model: LoadedModel) -> None:
    """Refuse to guess for a model whose states could not be taken back, and for one that says nothing.

    Raises:
        ConfigurationError: names the option and the model.
    """
    if not config.max_draft_tokens:
        return
    if model.pooling is not None:
        raise ConfigurationError(
            f"speculative {config.speculative!r} is for models that generate, and this one pools; leave it out"
        )
    if model.forward.mode not in ("lean", "packed"):
        raise ConfigurationError(
            f"speculative {config.speculative!r} needs a model whose tokens are packed, and {model.architecture} is "
            f"computed in the mode {model.forward.mode!r}, in which a wrong guess could not be taken back; leave it out"
        )
    if model.forward.keeps_state:
        raise ConfigurationError(
            f"speculative {config.speculative!r} needs a model that keeps keys and values alone, and "
            f"{model.architecture} keeps states, of which a wrong guess could not be taken back; leave it out"
        )


def make_guessing(config: EngineConfig, runner: ModelRunner, max_model_len: int) -> Guessing:
    """Return what guesses, once it is measured how many rows of a step are free; caches have to be allocated."""
    if not config.max_draft_tokens:
        return NoGuessing()
    memory = SuffixMemory() if config.speculative.startswith("suffix") else NoMemory()
    num_free_rows = measure_free_rows(runner, min(config.token_budget, max_model_len))
    return Speculation(config.max_draft_tokens, num_free_rows, memory)
