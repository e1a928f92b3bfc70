"""Experts that ranks share: each rank keeps a part of every layer's, and computes the tokens of all ranks with it.

transformers holds the experts of a layer in one module: tensors ``[E, ...]``, and a forward of (hidden states ``[T,
H]``, chosen experts ``[T, K]``, their weights ``[T, K]``). Here each of ``D`` ranks keeps ``E / D`` of them. In a
forward all ranks get the tokens of all. Each computes the pairs of token and expert that it holds, as tokens with one
choice each, and the results are summed. So a forward is a collective, even for a rank without tokens.

The results for a token are summed in another order than on one rank, and so rounded differently. All else is checked
once when a model is loaded: each layer's experts must give the same results as before for a few random rows.
"""

from __future__ import annotations

import inspect
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore

from ...shared.errors import ConfigurationError, GroupBrokenError
from ..config.data_parallel import RankPlace
from .parallel.communicator import Communicator, make_communicator
from .parallel.meeting import NetworkMeeting, listen

_ARGUMENTS = ("hidden_states", "top_k_index", "top_k_weights")
_CHECKED_ROWS = 5
_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
# Time for the slowest rank to load, for which the others wait at their first collective.
LOAD_TIMEOUT_S = 1800.0


class SharedExperts(nn.Module):
    """Experts ``[rank * E / D, (rank + 1) * E / D)`` of a layer, instead of all.

    Args:
        experts: transformers' module, reduced to this rank's part.
    """

    def __init__(self, experts: Any, ranks: ExpertRanks) -> None:
        super().__init__()
        self._ranks = ranks
        total = int(experts.num_experts)
        self._num_here = total // ranks.size
        self._first = ranks.rank * self._num_here
        for name, parameter in list(experts.named_parameters(recurse=False)):
            if parameter.shape[:1] == (total,):
                part = parameter.detach()[self._first : self._first + self._num_here].clone()
                setattr(experts, name, nn.Parameter(part, requires_grad=False))
        experts.num_experts = self._num_here
        self.local = experts

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return ``[T, H]`` for this rank's tokens; see the module's docstring."""
        ranks = self._ranks
        counts = ranks.counts(len(hidden_states), hidden_states.device)
        hidden = ranks.gather_rows(hidden_states, counts)
        index = ranks.gather_rows(top_k_index, counts) - self._first
        weights = ranks.gather_rows(top_k_weights, counts)
        tokens, choices = torch.nonzero((index >= 0) & (index < self._num_here), as_tuple=True)
        sums = torch.zeros_like(hidden)
        if len(tokens):
            pairs = (hidden[tokens], index[tokens, choices, None], weights[tokens, choices, None])
            sums.index_add_(0, tokens, self.local(*pairs).to(sums.dtype))
        ranks.sum_of(sums)
        first = sum(counts[: ranks.rank])
        return sums[first : first + len(hidden_states)]


def share_experts(module: nn.Module, ranks: ExpertRanks, architecture: str) -> int:
    """Keep this rank's part of the experts of ``module``, in all layers; return the total number per layer.

    Raises:
        ConfigurationError: there are none, or they cannot be divided.
    """
    experts: list[tuple[str, Any]] = [(name, part) for name, part in module.named_modules() if _is_experts(part)]
    if not experts:
        raise ConfigurationError(
            f"data_parallel_size is for models whose experts ranks share, and {architecture} has none here; start more "
            "engines of it without that option: each takes requests from the queue as it has room"
        )
    totals = {int(part.num_experts) for _, part in experts}
    for total in totals:
        if total % ranks.size:
            raise ConfigurationError(
                f"data_parallel_size {ranks.size} does not divide the {total} experts of {architecture}"
            )
    for name, part in experts:
        module.set_submodule(name, SharedExperts(part, ranks))
    return max(totals)


@torch.inference_mode()
def share_and_check(module: nn.Module, ranks: ExpertRanks, architecture: str) -> int:
    """Do as ``share_experts``, and verify that each layer's experts give the same results. All ranks do it together.

    Raises:
        ConfigurationError: as ``share_experts``, or results differ.
    """
    experts: dict[str, Any] = {name: part for name, part in module.named_modules() if _is_experts(part)}
    samples = {name: _draw(part) for name, part in experts.items()}
    before = {name: experts[name](*inputs) for name, inputs in samples.items()}
    try:
        total = share_experts(module, ranks, architecture)
    except ConfigurationError:
        ranks.await_all()  # so that every rank raises this error, and not that others are missing
        raise
    for name, inputs in samples.items():
        after = module.get_submodule(name)(*inputs)
        error = (after - before[name]).abs().max() / before[name].abs().max().clamp(min=1e-6)
        if not error <= _TOLERANCES.get(after.dtype, 5e-2):
            raise ConfigurationError(
                f"data_parallel_size: the experts of {architecture} ({name}) give something else when ranks share them"
            )
    return total


def _is_experts(part: nn.Module) -> bool:
    """Whether a module is one that the module's docstring describes."""
    total = getattr(part, "num_experts", None)
    if not isinstance(total, int) or isinstance(part, SharedExperts):
        return False
    has_tensors = any(tensor.ndim > 1 and len(tensor) == total for _, tensor in part.named_parameters(recurse=False))
    return has_tensors and tuple(inspect.signature(part.forward).parameters)[:3] == _ARGUMENTS


def _draw(experts: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same random rows at all ranks, which go to all experts in turn."""
    some = next(tensor for _, tensor in experts.named_parameters(recurse=False) if tensor.ndim > 1)
    width = _hidden_size(experts)
    generator = torch.Generator().manual_seed(0)
    total = int(experts.num_experts)
    num_rows = max(_CHECKED_ROWS, -(-total // 2))
    hidden = torch.randn(num_rows, width, generator=generator).to(some)
    index = (torch.arange(2 * num_rows) % total).reshape(num_rows, 2).to(some.device)
    weights = torch.rand(num_rows, 2, generator=generator).to(some)
    return hidden, index, weights


def _hidden_size(experts: Any) -> int:
    for name in ("hidden_dim", "hidden_size"):
        if isinstance(size := getattr(experts, name, None), int):
            return size
    return int(experts.config.hidden_size)


class ExpertRanks:
    """This process's place in a group whose ranks meet in each forward.

    All collectives wait for the others. Each raises ``GroupBrokenError`` if a rank exits or times out.
    """

    def __init__(self, place: RankPlace) -> None:
        self.rank, self.size = place.rank, place.size
        self._timeout_s = place.timeout_s
        self._communicator = Communicator()

    @classmethod
    def meet(cls, place: RankPlace, device: str, own_address: str = "") -> ExpertRanks:
        """Connect to the other ranks of the same generation; return when all are connected.

        Args:
            own_address: of this host, by which the others reach this rank; "" if it is that of ``place``.

        Raises:
            GroupBrokenError: some did not connect.
        """
        host, _, port = place.address.rpartition(":")
        is_first = place.rank == 0
        patience = timedelta(seconds=LOAD_TIMEOUT_S)
        try:
            listener = listen(host, int(port)) if is_first else None
            store = NetworkMeeting(host, int(port), own_address or host, listener).open_store(place.size, patience)
            dist.init_process_group(
                "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl",
                # Ranks that are still of another generation have other keys, if they connect at all.
                store=PrefixStore(f"{place.generation}", store),
                rank=place.rank,
                world_size=place.size,
                timeout=patience,
            )
        except (RuntimeError, ValueError, OSError) as error:
            raise GroupBrokenError(f"the ranks of the group have not met at {place.address}: {error}") from error
        return cls(place)

    def settle(self) -> None:
        """End loading: from now on a rank that exceeds the group's time-out is lost."""
        try:
            # The result of `new_group` has no public type.
            group: Any = dist.new_group(timeout=timedelta(seconds=self._timeout_s))
            self._communicator = make_communicator(group, self._timeout_s)
        except RuntimeError as error:
            raise _broken(error) from error
        self.sum_of(torch.zeros(1, dtype=torch.int64))

    def sum_of(self, part: Tensor) -> Tensor:
        """Sum ``part`` over all ranks, in place; return it. Its shape is the same at all."""
        try:
            return self._communicator.sum(part)
        except RuntimeError as error:
            raise _broken(error) from error

    def await_all(self) -> None:
        """Return when all have called this, or one is lost. A rank that leaves earlier would be missed by the
        others.
        """
        with suppress(GroupBrokenError):
            self.sum_of(torch.zeros(1, dtype=torch.int64))

    def gather_rows(self, rows: Tensor, num_rows: list[int]) -> Tensor:
        """Return the rows of all ranks, concatenated to ``[sum(num_rows), ...]``; ``rows`` are those of this one.

        Args:
            num_rows: of each rank.
        """
        most = max(num_rows)
        padded = rows.new_zeros(most, *rows.shape[1:])
        padded[: len(rows)] = rows
        try:
            all_rows = self._communicator.parts(padded)
        except RuntimeError as error:
            raise _broken(error) from error
        return torch.cat([part[:count] for part, count in zip(all_rows, num_rows, strict=True)])

    def counts(self, number: int, device: torch.device) -> list[int]:
        """Return ``number`` of each rank."""
        mine = torch.zeros(self.size, dtype=torch.int64, device=device)
        mine[self.rank] = number
        return self.sum_of(mine).tolist()


def _broken(error: RuntimeError) -> GroupBrokenError:
    first = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return GroupBrokenError(f"a rank of the group is gone or says nothing: {first}")
