"""The forward of a model that several ranks compute together, as used by rank 0."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ...models.attention.call import AttentionCall
from ...models.attention.page_layout import PageLayout
from ...models.attention.pages import PagedByGroups
from ...models.forward import Forward, ModelInput
from ...models.lean.captured import CapturedForward
from ...models.lean.staged import StagedForward
from .messages import Allocate, CaptureNext, CommitStep, FinishStep, Profile
from .step_codec import StepSender
from .team import RankTeam

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ShardedForward:
    """A ``Forward`` that sends every call to the other ranks and also runs it on this rank.

    An exception in ``run`` or ``profile`` on any rank ends the engine, because the other ranks wait in a collective or
    have failed elsewhere, and their states may differ. So a request that makes a forward raise is identified by the
    engines that die on it (ops/decisions/blame.md), not by the isolation of a batch.

    Args:
        local: the part of this rank.
        team: the other ranks, each with its part of the same model.
    """

    def __init__(self, local: Forward, team: RankTeam) -> None:
        self.local = local
        self._team = team
        self._sender = StepSender()

    @property
    def mode(self) -> str:
        return self.local.mode

    @property
    def network(self) -> nn.Module:
        """The network of this rank's part."""
        return self.local.network

    def network_of(self, module: PreTrainedModel) -> nn.Module:
        return self.local.network_of(module)

    @property
    def takes_embeds(self) -> bool:
        return self.local.takes_embeds

    @property
    def keeps_state(self) -> bool:
        return self.local.keeps_state

    @property
    def attention_calls(self) -> list[AttentionCall]:
        """The attention calls of this rank."""
        return self.local.attention_calls

    @property
    def caches(self) -> list[Tensor]:
        """The caches of this rank."""
        return self.local.caches

    @property
    def bytes_per_token(self) -> int:
        """Bytes of cache per token on this rank."""
        return self.local.bytes_per_token

    @property
    def bytes_per_request(self) -> int:
        """Bytes of cache per request on this rank."""
        return self.local.bytes_per_request

    def allocate(self, num_blocks: int, block_size: int, num_slots: int, device: torch.device) -> None:
        """Allocate on all ranks; raise the error of this rank, or else that of another rank.

        If graphs are captured, which all ranks do together, a failure ends the engine.
        """
        captures = num_blocks > 0 and isinstance(self.local, CapturedForward)
        do_on_all = self._team.compute if captures else self._team.together
        do_on_all(
            Allocate(num_blocks, block_size, num_slots, captures),
            lambda: self.local.allocate(num_blocks, block_size, num_slots, device),
        )

    def allocate_pages(
        self, layout: PageLayout, num_pages: int, block_size: int, num_slots: int, device: torch.device
    ) -> None:
        """Allocate pages on all ranks, all of which must support ``PagedByGroups``; raises as ``allocate``."""
        local = self.local
        assert isinstance(local, PagedByGroups)
        captures = isinstance(local, CapturedForward)
        do_on_all = self._team.compute if captures else self._team.together
        do_on_all(
            Allocate(num_pages, block_size, num_slots, captures, layout),
            lambda: local.allocate_pages(layout, num_pages, block_size, num_slots, device),
        )

    @property
    def num_uncaptured(self) -> int:
        """See ``CapturesLater``. It is the same on all ranks."""
        return self.local.num_uncaptured if isinstance(self.local, CapturedForward) else 0

    def capture_next(self) -> None:
        """Capture one of ``num_uncaptured`` graphs on all ranks, the same on each; raises as ``run``."""
        local = self.local
        assert isinstance(local, CapturedForward), "none is missing"
        self._team.compute(CaptureNext(), local.capture_next)

    def run(self, step: ModelInput) -> Tensor:
        """Run ``step`` on all ranks; raise ``RankLostError`` if it fails on any."""
        self._team.send(self._sender.message_of(step))
        try:
            return self.local.run(step)
        except Exception as error:
            raise self._team.loss(error) from error

    def commit(self) -> None:
        if self.local.keeps_state:
            self._team.send(CommitStep())
        self.local.commit()

    def profile(self, num_tokens: int, num_logit_rows: int) -> None:
        """Profile on all ranks; raises as ``run``."""
        self._team.compute(Profile(num_tokens, num_logit_rows), lambda: self.local.profile(num_tokens, num_logit_rows))


class StagedShardedForward(ShardedForward):
    """The ``ShardedForward`` of a model in stages, which may have several steps in flight."""

    def __init__(self, local: StagedForward, team: RankTeam) -> None:
        super().__init__(local, team)
        self._steps = local

    def start(self, step: ModelInput) -> None:
        """See ``StagedSteps``; raises as ``run``."""
        message = self._sender.message_of(step)
        message.is_started = True
        self._team.send(message)
        try:
            self._steps.start(step)
        except Exception as error:
            raise self._team.loss(error) from error

    def finish(self) -> Tensor:
        """See ``StagedSteps``; raises as ``run``."""
        # Sent first, because the other ranks of this stage join the logits in the order of these messages.
        self._team.send(FinishStep())
        try:
            return self._steps.finish()
        except Exception as error:
            raise self._team.loss(error) from error


def sharded_forward(local: Forward, team: RankTeam) -> ShardedForward:
    """Return a forward that runs the calls of ``local`` on all ranks."""
    return StagedShardedForward(local, team) if isinstance(local, StagedForward) else ShardedForward(local, team)
