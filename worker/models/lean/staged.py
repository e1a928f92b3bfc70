"""The lean path as one stage of a pipeline, which computes some of the layers."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..forward import Forward, ForwardSettings, ModelInput
from ..parallel.groups import RankGroups
from .forward import LeanForward, LeanWrapper
from .layers.layer import Attend

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class StagedForward(LeanWrapper):
    """A ``forward.Forward`` of one stage. Every stage runs the same steps in the same order.

    The first stage has embeddings and head, the last one the final norm. Stages pass on the residual stream ``[T,
    hidden size]``, in the dtype in which one rank keeps it between layers; the last stage returns the normalised rows
    that need logits to the first.

    ``run`` is ``start`` and ``finish``. The first stage may start as many steps as there are stages before it finishes
    one, if the steps share no request. The other stages do all of their part in ``start``.

    Args:
        lean: with the layers of this stage.

    Attributes:
        layers: the forward of the layers: ``lean``, or the same in one call of the compiled library.
    """

    def __init__(self, lean: LeanForward, groups: RankGroups) -> None:
        super().__init__(lean)
        self.layers: Forward = lean
        self._groups = groups
        self._num_logit_rows: deque[int] = deque()

    def allocate(self, num_blocks: int, block_size: int, num_slots: int, device: torch.device) -> None:
        self.layers.allocate(num_blocks, block_size, num_slots, device)

    @property
    def caches(self) -> list[Tensor]:
        """Keys and values of the layers of this stage."""
        return self.layers.caches

    def run(self, step: ModelInput) -> Tensor:
        """Return logits ``[R, V]`` at the first stage; elsewhere zeros ``[R, 1]``."""
        self.start(step)
        return self.finish()

    def start(self, step: ModelInput) -> None:
        """Compute this stage's part of ``step``, and send it on."""
        stream = None if self._groups.is_first_stage else self._receive(len(step.positions))
        if self.layers is self.lean:
            self.network.token_adapters.begin(step.token_lora)
            inputs = step.inputs_embeds if stream is None else stream
            rows = self._run_layers(inputs, step.token_ids, step.positions, step.logit_rows, self.lean.attend_to(step))
        else:
            rows = self._run_compiled(step, stream)
        self._groups.send_on(rows)
        self._num_logit_rows.append(len(step.logit_rows))

    def finish(self) -> Tensor:
        """Return the result of ``run`` for the oldest step that was started."""
        num_rows = self._num_logit_rows.popleft()
        if not self._groups.is_first_stage:
            return self.network.embed_tokens.weight.new_zeros(num_rows, 1)
        return self.network.logits(self._receive(num_rows))

    def profile(self, num_tokens: int, num_logit_rows: int) -> None:
        device = self.network.norm.weight.device
        positions = torch.arange(min(num_tokens, self.lean.max_model_len), device=device)
        self.network.token_adapters.begin(None)
        stream = None if self._groups.is_first_stage else self._receive(len(positions))
        rows = positions[-num_logit_rows:]
        attentions = self.lean.attend_to_nothing()
        self._groups.send_on(self._run_layers(stream, torch.zeros_like(positions), positions, rows, attentions))
        self._num_logit_rows.append(len(rows))
        self.finish()

    def _receive(self, num_rows: int) -> Tensor:
        weight = self.network.embed_tokens.weight
        return self._groups.receive(weight.new_empty(num_rows, weight.shape[1]))

    def _run_layers(
        self,
        inputs: Tensor | None,
        token_ids: Tensor,
        positions: Tensor,
        logit_rows: Tensor,
        attentions: list[Attend],
    ) -> Tensor:
        """Return the rows for the next stage.

        Args:
            inputs: ``[T, hidden size]``, input of this stage's first layer; None for the embeddings of ``token_ids``.
        """
        network, groups = self.network, self._groups
        first: Tensor = network.embed_tokens(token_ids) if inputs is None else inputs
        hidden, residual = network.begin(first) if groups.is_first_stage else (first, torch.zeros_like(first))
        if groups.is_last_stage:
            last = network.run_layers(hidden, residual, positions, attentions, last_rows=logit_rows)
            return network.normalise(*last)
        hidden, residual = network.run_layers(hidden, residual, positions, attentions, last_rows=None)
        return hidden + residual

    def _run_compiled(self, step: ModelInput, stream: Tensor | None) -> Tensor:
        """Return the same by the compiled library."""
        changes: dict[str, Any] = {} if stream is None else {"inputs_embeds": stream}
        if not self._groups.is_last_stage:
            changes["logit_rows"] = torch.arange(len(step.positions))
        return self.layers.run(replace(step, **changes)).to(self.network.embed_tokens.weight.dtype)


def computing_layers(forward: Forward) -> Forward:
    """Return the forward that computes the layers: that of a stage, or ``forward`` itself."""
    return forward.layers if isinstance(forward, StagedForward) else forward


def lean_forward(module: PreTrainedModel, settings: ForwardSettings) -> LeanForward | StagedForward:
    """Compute ``module``, or the stage of it that a rank has, by the lean path.

    Raises: as ``LeanForward``.
    """
    lean = LeanForward(module, settings)
    groups = settings.groups
    return lean if groups is None or groups.layout.pipeline == 1 else StagedForward(lean, groups)
