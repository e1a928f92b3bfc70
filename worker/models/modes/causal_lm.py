"""Call a transformers model with the arguments that its architecture takes."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

_CACHE_ARGUMENTS = ("past_key_values", "cache_params")


class CausalLM:
    """A transformers model with a language model head.

    Attributes:
        cache_argument: name of the argument that takes a ``Cache``; None if it takes none.
        takes_positions: it takes the position of each token.
        takes_embeds: it can run from the embeddings of its tokens.
    """

    def __init__(self, module: PreTrainedModel) -> None:
        self.module = module
        parameters = inspect.signature(module.forward).parameters
        names = set(parameters)
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            names |= set(inspect.signature(module.base_model.forward).parameters)
        self.cache_argument = next((name for name in _CACHE_ARGUMENTS if name in names), None)
        self.takes_positions = "position_ids" in names
        self.takes_embeds = "inputs_embeds" in parameters
        self._takes_logits_to_keep = "logits_to_keep" in parameters

    def logits(self, rows: Tensor, **inputs: Any) -> Tensor:
        """Run a forward of ``[B, T]`` tokens; return the logits of the tokens ``rows`` of each row, ``[B, R, V]``."""
        if self._takes_logits_to_keep:
            return self.module(**inputs, logits_to_keep=rows).logits
        return self.module(**inputs).logits[:, rows]
