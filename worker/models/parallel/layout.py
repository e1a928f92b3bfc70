"""Which ranks compute one model together: numbers only, no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ParallelLayout:
    """Ranks ``0 .. world_size`` in a grid: those of one stage are consecutive.

    With ``tensor`` 2 and ``pipeline`` 2, stage 0 has ranks 0 and 1, stage 1 has ranks 2 and 3.

    Args:
        tensor: ranks that share each layer.
        pipeline: stages, each of which has a part of the layers.
        is_expert_parallel: ranks of a stage have whole experts, instead of a part of each.
    """

    tensor: int = 1
    pipeline: int = 1
    is_expert_parallel: bool = False

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipeline

    def tensor_rank(self, rank: int) -> int:
        """Return the index of ``rank`` among those that share its layers."""
        return rank % self.tensor

    def pipeline_rank(self, rank: int) -> int:
        """Return the stage of ``rank``."""
        return rank // self.tensor

    def rank_at(self, pipeline_rank: int, tensor_rank: int) -> int:
        return pipeline_rank * self.tensor + tensor_rank

    @property
    def tensor_groups(self) -> tuple[tuple[int, ...], ...]:
        """For each stage, the ranks that share its layers."""
        return tuple(
            tuple(self.rank_at(stage, number) for number in range(self.tensor)) for stage in range(self.pipeline)
        )

    @property
    def pipeline_chains(self) -> tuple[tuple[int, ...], ...]:
        """For each tensor rank, the ranks that pass on a step, in the order of the stages."""
        return tuple(
            tuple(self.rank_at(stage, number) for stage in range(self.pipeline)) for number in range(self.tensor)
        )

    def stage_layers(self, rank: int, num_layers: int) -> range:
        """Return the layers of the rank's stage, of ``num_layers`` in total, divided as evenly as possible."""
        stage = self.pipeline_rank(rank)
        return range(num_layers * stage // self.pipeline, num_layers * (stage + 1) // self.pipeline)
