"""Parameters for a model that pools, and its result as it is sent."""

from __future__ import annotations

import array
import math
import sys
from typing import Any

import msgspec

from ..errors import UnsupportedParameterError, UnsupportedTaskError, ValidationError
from ..values.arguments import CheckedNames
from ..values.checks import check_text
from ..values.shown import shown
from .checks import check_number
from .kinds import POOLING_TASKS, RequestOutputKind
from .prompts import check_truncation

MAX_DIMENSIONS = 1 << 20
MAX_PROMPT_NAME_CHARS = 256
# Limit of one result, which is one record: a vector for each token of a long text may be too much.
MAX_RESULT_BYTES = 4 * 1024 * 1024
# Tasks of vLLM that are not supported, and their alternatives.
_NO_TASKS = {
    "score": "vLLM has removed it; ask for classify of pairs, or call score, which chooses by the model",
    "plugin": "it goes with data, for an I/O processor; without data ask for one of " + ", ".join(POOLING_TASKS),
    "embed&token_classify": "ask for embed and token_classify in two requests",
}


class PoolingParams(
    msgspec.Struct, metaclass=CheckedNames, array_like=True, omit_defaults=True, frozen=True, kw_only=True, gc=False
):
    """The result to return for a pooled prompt.

    Args:
        task: "embed" (one vector), "classify" (a number for each class), "token_embed" and "token_classify" (the same
            for each token); the model's own where it is left out.
        dimensions: length to which an embedding is cut; for models that were trained for that (matryoshka).
        use_activation: normalise embeddings, or turn logits of classes into probabilities; as the model says if None.
        prompt_name: which of the prompts that come with the model the text begins with.
        truncate_prompt_tokens: keep that many last tokens, and -1 as many as the model takes; of a pair, the longer
            text is cut until both fit. Special tokens that the model expects are kept.

    Raises:
        ValidationError: a value has the wrong type or range.
        UnsupportedTaskError: a task of vLLM that is none here.
        UnsupportedParameterError: a parameter of vLLM that means nothing here.
    """

    task: str | None = None
    dimensions: int | None = None
    use_activation: bool | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None
    requires_token_ids: bool = False
    skip_reading_prefix_cache: bool | None = None
    extra_kwargs: dict[str, Any] | None = None
    output_kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY
    prompt_name: str | None = None
    truncate_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.task is not None and self.task not in POOLING_TASKS:
            if isinstance(self.task, str) and self.task in _NO_TASKS:
                raise UnsupportedTaskError(f"task {shown(self.task)} is not served: {_NO_TASKS[self.task]}")
            raise ValidationError(f"task must be one of {', '.join(POOLING_TASKS)}, got {shown(self.task)}")
        if self.dimensions is not None:
            check_number("dimensions", self.dimensions, int, 1, MAX_DIMENSIONS)
        for name in ("use_activation", "skip_reading_prefix_cache"):
            if not isinstance(getattr(self, name), bool | None):
                raise ValidationError(f"{name} must be True, False or None, got {shown(getattr(self, name))}")
        if self.prompt_name is not None:
            if not isinstance(self.prompt_name, str) or not 1 <= len(self.prompt_name) <= MAX_PROMPT_NAME_CHARS:
                raise ValidationError(
                    f"prompt_name must be a string of 1 to {MAX_PROMPT_NAME_CHARS} characters, got "
                    f"{shown(self.prompt_name)}"
                )
            check_text("prompt_name", self.prompt_name)
        if self.truncate_prompt_tokens is not None:
            check_truncation(self.truncate_prompt_tokens)
        for name in ("step_tag_id", "returned_token_ids", "extra_kwargs"):
            if getattr(self, name) is not None:
                raise UnsupportedParameterError(f"{name} is not supported; leave it at None")


class PoolingSetup(msgspec.Struct, omit_defaults=True, frozen=True, kw_only=True):
    """Facts about a model that pools.

    Args:
        dimensions: length of an uncut embedding; 0 for a model without embeddings.
        matryoshka_dimensions: lengths to which it may be cut; None for any.
        labels: names of the classes; empty for a model that embeds.
        prompts: texts to begin with, by name; ``default_prompt_name`` is that of texts that name none.
    """

    dimensions: int = 0
    matryoshka_dimensions: tuple[int, ...] | None = None
    labels: tuple[str, ...] = ()
    prompts: dict[str, str] = {}
    default_prompt_name: str | None = None


class Pooled(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True, kw_only=True, gc=False):
    """Result of a pooled prompt: ``float32``, little-endian, of ``shape`` ``[D]`` or ``[T, D]``."""

    version: int = 1
    data: bytes
    shape: tuple[int, ...]
    dtype: str = "float32"

    def floats(self) -> array.array[float]:
        """Return all its numbers in one row.

        Raises:
            ValidationError: they are of another dtype, or not as many as ``shape`` says.
        """
        if self.dtype != "float32":
            raise ValidationError(f"the result is of dtype {shown(self.dtype)}, and this version reads float32")
        if len(self.data) != 4 * math.prod(self.shape):
            raise ValidationError(f"the result has {len(self.data)} bytes, which is not its shape {list(self.shape)}")
        floats = array.array("f", self.data)
        if sys.byteorder == "big":
            floats.byteswap()
        return floats
