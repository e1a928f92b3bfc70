"""Base of forwards that compute a ``LeanForward`` in another way."""

from __future__ import annotations

from transformers import PreTrainedModel

from ..attention.call import AttentionCall
from .forward import LeanForward
from .layers.decoder import LeanDecoder


class LeanWrapper:
    """The methods of ``forward.Forward`` that follow from ``lean``, on the same weights."""

    mode = "lean"

    def __init__(self, lean: LeanForward) -> None:
        self.network = lean.network
        self.lean = lean

    def network_of(self, module: PreTrainedModel) -> LeanDecoder:
        return self.lean.network_of(module)

    @property
    def takes_embeds(self) -> bool:
        return self.lean.takes_embeds

    @property
    def attention_calls(self) -> list[AttentionCall]:
        return self.lean.attention_calls

    @property
    def keeps_state(self) -> bool:
        return self.lean.keeps_state

    @property
    def bytes_per_request(self) -> int:
        return self.lean.bytes_per_request

    @property
    def bytes_per_token(self) -> int:
        return self.lean.bytes_per_token

    def commit(self) -> None:
        self.lean.commit()

    def profile(self, num_tokens: int, num_logit_rows: int) -> None:
        self.lean.profile(num_tokens, num_logit_rows)
