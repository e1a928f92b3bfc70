"""The lean path as one stage of a pipeline, which computes some of the layers."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..forward import ForwardSettings, ModelInput
from ..parallel.groups import RankGroups
from .forward import LeanForward, LeanWrapper
from .layers.layer import Attend

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class StagedForward(LeanWrapper):
    """A ``forward.Forward`` of one stage. Every stage runs the same steps in the same order.

    The first stage has embeddings and head, the last one the final norm. Stages pass on hidden and residual rows ``[2,
    T, hidden size]``; the last stage returns the rows that need logits to the first.

    ``run`` is ``start`` and ``finish``. The first stage may start as many steps as there are stages before it finishes
    one, if the steps share no request. The other stages do all of their part in ``start``.

    Args:
        lean: with the layers of this stage.
    """

    def __init__(self, lean: LeanForward, groups: RankGroups) -> None:
        super().__init__(lean)
        self._groups = groups
        self._num_logit_rows: deque[int] = deque()

    def allocate(self, num_blocks: int, block_size: int, num_slots: int, device: torch.device) -> None:
        self.lean.allocate(num_blocks, block_size, num_slots, device)

    @property
    def caches(self) -> list[Tensor]:
        """Keys and values of the layers of this stage."""
        return self.lean.caches

    def run(self, step: ModelInput) -> Tensor:
        """Return logits ``[R, V]`` at the first stage; elsewhere zeros ``[R, 1]``."""
        self.start(step)
        return self.finish()

    def start(self, step: ModelInput) -> None:
        """Compute this stage's part of ``step``, and send it on."""
        self.network.token_adapters.begin(step.token_lora)
        attentions = self.lean.attend_to(step)
        self._compute(step.token_ids, step.positions, step.logit_rows, step.inputs_embeds, attentions)

    def finish(self) -> Tensor:
        """Return the result of ``run`` for the oldest step that was started."""
        num_rows = self._num_logit_rows.popleft()
        weight = self.network.norm.weight
        if not self._groups.is_first_stage:
            return weight.new_zeros(num_rows, 1)
        return self.network.logits(self._groups.receive(weight.new_empty(num_rows, len(weight))))

    def profile(self, num_tokens: int, num_logit_rows: int) -> None:
        device = self.network.norm.weight.device
        positions = torch.arange(min(num_tokens, self.lean.max_model_len), device=device)
        self.network.token_adapters.begin(None)
        rows = positions[-num_logit_rows:]
        self._compute(torch.zeros_like(positions), positions, rows, None, self.lean.attend_to_nothing())
        self.finish()

    def _compute(
        self,
        token_ids: Tensor,
        positions: Tensor,
        logit_rows: Tensor,
        inputs_embeds: Tensor | None,
        attentions: list[Attend],
    ) -> None:
        network, groups = self.network, self._groups
        if groups.is_first_stage:
            hidden = network.embed_tokens(token_ids) if inputs_embeds is None else inputs_embeds
            hidden, residual = network.begin(hidden)
        else:
            weight = network.norm.weight
            hidden, residual = groups.receive(weight.new_empty(2, len(positions), len(weight)))
        if groups.is_last_stage:
            last = network.run_layers(hidden, residual, positions, attentions, last_rows=logit_rows)
            groups.send_on(network.normalise(*last))
        else:
            passed = network.run_layers(hidden, residual, positions, attentions, last_rows=None)
            groups.send_on(torch.stack(passed))
        self._num_logit_rows.append(len(logit_rows))


def lean_forward(module: PreTrainedModel, settings: ForwardSettings) -> LeanForward | StagedForward:
    """Compute ``module``, or the stage of it that a rank has, by the lean path.

    Raises: as ``LeanForward``.
    """
    lean = LeanForward(module, settings)
    groups = settings.groups
    return lean if groups is None or groups.layout.pipeline == 1 else StagedForward(lean, groups)
