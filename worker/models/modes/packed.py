"""All tokens of a step in one row ``[1, T]``: for models that mix tokens only in our attention.

Most decoders do. Prefill chunks and decodes of any requests share one forward, without padding.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ....shared.errors import ModelLoadError
from ..attention.call import AttentionCall, caches_of
from ..attention.page_layout import PageLayout
from ..attention.paged_attention import PagedAttention
from ..attention.pages import allocate_pages
from ..forward import ForwardSettings, ModelInput, TokenAdapters

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PROBE_TOKENS = 2
# transformers 5.24 calls it "cache"; older versions have the others.
_CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")


class PackedForward:
    """A ``forward.Forward`` in one packed row.

    Raises:
        ModelLoadError: the model does not use transformers' attention interface, or needs attention that we do not
            support.
    """

    mode = "packed"
    keeps_state = False
    bytes_per_request = 0

    def __init__(self, module: PreTrainedModel, settings: ForwardSettings) -> None:
        self.network = module
        self.token_adapters = TokenAdapters()
        self._model = CausalLM(module)
        self._settings = settings
        self._attention = PagedAttention(
            is_batch_invariant=settings.is_batch_invariant, backend=settings.attention_backend
        )
        install_attention(module, self._attention.name)
        self.profile(_PROBE_TOKENS, num_logit_rows=1)
        if not self._attention.calls:
            raise ModelLoadError("it ignores transformers' attention interface")

    def network_of(self, module: PreTrainedModel) -> nn.Module:
        return module

    @property
    def takes_embeds(self) -> bool:
        return self._model.takes_embeds

    @property
    def attention_calls(self) -> list[AttentionCall]:
        """The attention calls of the model's own code, in order; see ``forward.Forward``."""
        return self._attention.calls

    def forget_attentions(self) -> None:
        """Release the model's modules, for a forward that computes differently. It cannot be run afterwards."""
        self._attention.calls = []

    @property
    def caches(self) -> list[Tensor]:
        return caches_of(self._attention.calls)

    @property
    def bytes_per_token(self) -> int:
        return self._attention.bytes_per_token

    def allocate(self, num_blocks: int, block_size: int, num_slots: int, device: torch.device) -> None:
        self._attention.allocate(num_blocks, block_size, device)

    def allocate_pages(
        self, layout: PageLayout, num_pages: int, block_size: int, num_slots: int, device: torch.device
    ) -> None:
        """See ``pages.PagedByGroups``."""
        allocate_pages(self._attention.calls, layout, num_pages, block_size, device)

    def run(self, step: ModelInput) -> Tensor:
        self._attention.begin(step.batch)
        self.token_adapters.begin(step.token_lora)
        image_arguments = {} if step.vision_inputs is None else step.vision_inputs.arguments(len(step.token_ids))
        return self._run_module(step.token_ids, step.positions, step.logit_rows, step.inputs_embeds, image_arguments)

    def commit(self) -> None:
        """Do nothing: a step that is computed again writes its keys and values again."""

    def profile(self, num_tokens: int, num_logit_rows: int) -> None:
        self.token_adapters.begin(None)
        max_model_len = self._settings.max_model_len
        positions = torch.arange(min(num_tokens, max_model_len), device=self._model.module.device)
        token_ids = torch.zeros_like(positions)
        self._attention.record(
            lambda: self._run_module(token_ids, positions, positions[-num_logit_rows:]), max_model_len
        )

    def _run_module(
        self,
        token_ids: Tensor,
        positions: Tensor,
        logit_rows: Tensor,
        inputs_embeds: Tensor | None = None,
        image_arguments: Mapping[str, Any] = MappingProxyType({}),
    ) -> Tensor:
        # Without a mask transformers guesses from the positions which tokens belong together.
        mask = torch.ones_like(token_ids)[None]
        inputs: dict[str, Any] = {"position_ids": positions[None], "attention_mask": mask}
        if inputs_embeds is None:
            inputs["input_ids"] = token_ids[None]
        else:
            inputs["inputs_embeds"] = inputs_embeds[None]
        inputs |= self._past(positions)
        return self._model.logits(logit_rows, **(inputs | dict(image_arguments)), use_cache=False)[0]

    def _past(self, positions: Tensor) -> dict[str, Any]:
        """Return arguments that describe earlier tokens, if the model needs any besides ``position_ids``."""
        return {}


def install_attention(module: PreTrainedModel, name: str) -> None:
    """Replace the model's attention by the one that is registered as ``name``.

    Raises:
        ModelLoadError: the model declares that its attention cannot be replaced.
    """
    if not module._can_set_attn_implementation():
        raise ModelLoadError("it does not let its attention be replaced")
    module.set_attn_implementation(name)


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
