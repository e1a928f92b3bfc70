"""Passes prompt embeddings and image features to the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....kernels.paged_attention import PagedBatch
from ....shared.errors import ConfigurationError
from ...models.forward import ModelInput, VisionInputs
from ...models.loaded import LoadedModel
from .input_tables import StepEmbeds

# The probe fills a block, and blocks have an even number of tokens in some layouts.
_NUM_PROBED_TOKENS = 8
# Allowed difference between logits from ids and from their embeddings. Small, since both compute the same products.
_TOLERANCE = 1e-2


def embed_inputs(model: LoadedModel, token_ids: Tensor, embeds: StepEmbeds) -> Tensor:
    """Return the input of a forward, ``[T, hidden size]``: embeddings of ``token_ids``, partly replaced by ``embeds``.

    Wider rows continue with features for deeper layers (see ``vision_inputs_of``).
    """
    inputs = _input_embeddings(model)(token_ids)
    inputs[torch.from_numpy(embeds.places).to(model.device)] = embeds.rows[:, : inputs.shape[1]].to(inputs)
    return inputs


def vision_inputs_of(
    model: LoadedModel, axes: NDArray[np.int64] | None, embeds: StepEmbeds | None, hidden_size: int
) -> VisionInputs | None:
    """Return the vision inputs of a step in addition to embeddings; None if it has none.

    Args:
        axes: ``[3, T]``, positions in three axes; None where they are the same.
        hidden_size: width of the embedding at the start of each row of ``embeds``.
    """
    positions = None if axes is None else torch.from_numpy(axes).to(model.device)
    if embeds is None or embeds.rows.shape[1] == hidden_size:
        return None if positions is None else VisionInputs(positions)
    deeper = embeds.rows[:, hidden_size:].to(model.device, model.dtype).split(hidden_size, dim=1)
    return VisionInputs(positions, torch.from_numpy(embeds.places).to(model.device), deeper)


@torch.inference_mode()
def embeds_hidden_size(model: LoadedModel) -> int:
    """Return the width of prompt embeddings. Call it before the KV cache is allocated.

    Raises:
        ConfigurationError: the model cannot be run from embeddings, or gives other results then, because its deeper
            layers read the token ids again.
    """
    refusal = ConfigurationError(
        f"enable_prompt_embeds: {model.architecture} cannot be run from embeddings; leave --enable-prompt-embeds out"
    )
    if not model.forward.takes_embeds:
        raise refusal
    token_ids = torch.arange(_NUM_PROBED_TOKENS, device=model.device) * 7919 % model.vocab_size
    embeds = _input_embeddings(model)(token_ids)
    expected, actual = _probe(model, token_ids, None), _probe(model, token_ids, embeds)
    if not (actual - expected).norm() <= _TOLERANCE * expected.norm():
        raise refusal
    return embeds.shape[1]


def _input_embeddings(model: LoadedModel) -> Callable[[Tensor], Tensor]:
    """Return the model's embedding layer."""
    return cast(Any, model.network).get_input_embeddings()


def _probe(model: LoadedModel, token_ids: Tensor, inputs_embeds: Tensor | None) -> Tensor:
    """Return the logits of a short prompt, computed with a temporary cache."""
    num_tokens, device = len(token_ids), model.device
    model.forward.allocate(1, num_tokens, 1, device)
    positions = torch.arange(num_tokens, device=device)
    batch = PagedBatch(
        torch.zeros((1, 1), dtype=torch.long, device=device), positions, [num_tokens], [num_tokens], num_tokens
    )
    step = ModelInput(token_ids, positions, positions, batch, np.zeros(1, np.int64), inputs_embeds)
    return model.forward.run(step).float()
