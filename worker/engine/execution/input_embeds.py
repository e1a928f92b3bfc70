"""Where prompt embeddings meet the model."""

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
from ..sampling.given_embeds import GivenEmbeds

# They fill a block, and blocks have an even number of tokens in some layouts.
_NUM_PROBED_TOKENS = 8
# Of a prompt by its ids and by their embeddings: the same products, so hardly any rounding.
_TOLERANCE = 1e-2


def embed_inputs(model: LoadedModel, token_ids: NDArray[np.int64], given: GivenEmbeds) -> Tensor:
    """Return what a forward begins with, ``[T, hidden size]``: the embeddings of ``token_ids``, or what is given.

    Of rows that are wider, what stands behind is for deeper layers (see ``sight_of``).
    """
    inputs = _input_embeddings(model)(torch.from_numpy(token_ids).to(model.device))
    inputs[torch.from_numpy(given.places).to(model.device)] = given.rows[:, : inputs.shape[1]].to(inputs)
    return inputs


def sight_of(
    model: LoadedModel, axes: NDArray[np.int64] | None, given: GivenEmbeds | None, hidden_size: int
) -> VisionInputs | None:
    """Return what a step has of images beside embeddings; None if it has nothing.

    Args:
        axes: ``[3, T]``, positions in three axes; None where they are the same.
        hidden_size: what of each given row is its embedding.
    """
    placed = None if axes is None else torch.from_numpy(axes).to(model.device)
    if given is None or given.rows.shape[1] == hidden_size:
        return None if placed is None else VisionInputs(placed)
    deeper = given.rows[:, hidden_size:].to(model.device, model.dtype).split(hidden_size, dim=1)
    return VisionInputs(placed, torch.from_numpy(given.places).to(model.device), deeper)


@torch.inference_mode()
def embeds_hidden_size(model: LoadedModel) -> int:
    """Return the size of a row of prompt embeddings; to be asked before the KV cache is allocated.

    Raises:
        ConfigurationError: the model cannot be run from embeddings, or gives other results then: some look at the
            token ids again further up.
    """
    refusal = ConfigurationError(
        f"enable_prompt_embeds: {model.architecture} cannot be run from embeddings; leave --enable-prompt-embeds out"
    )
    if not model.forward.takes_embeds:
        raise refusal
    token_ids = torch.arange(_NUM_PROBED_TOKENS, device=model.device) * 7919 % model.vocab_size
    embeds = _input_embeddings(model)(token_ids)
    expected, found = _probe(model, token_ids, None), _probe(model, token_ids, embeds)
    if not (found - expected).norm() <= _TOLERANCE * expected.norm():
        raise refusal
    return embeds.shape[1]


def _input_embeddings(model: LoadedModel) -> Callable[[Tensor], Tensor]:
    """What makes the model's own embeddings of token ids."""
    return cast(Any, model.network).get_input_embeddings()


def _probe(model: LoadedModel, token_ids: Tensor, inputs_embeds: Tensor | None) -> Tensor:
    """Logits of one short prompt, in a cache of its own."""
    num_tokens, device = len(token_ids), model.device
    model.forward.allocate(1, num_tokens, 1, device)
    positions = torch.arange(num_tokens, device=device)
    batch = PagedBatch(
        torch.zeros((1, 1), dtype=torch.long, device=device), positions, [num_tokens], [num_tokens], num_tokens
    )
    step = ModelInput(token_ids, positions, positions, batch, np.zeros(1, np.int64), inputs_embeds)
    return model.forward.run(step).float()
