"""The ranks of a data-parallel group in torch: how they connect, and which messages they exchange."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from ....shared.deployment.groups.errors import GroupBrokenError
from ...config.data_parallel import RankPlace
from ..parallel.communicator import Communicator, make_communicator
from .listening import choose_interface, listen

# Time for the slowest rank to load, for which the others wait at their first collective.
LOAD_TIMEOUT_S = 1800.0


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
            choose_interface(own_address or host)
            # Early ranks wait for the first rank to listen; its worker process knows better whether it will.
            store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage] - torch's documentation says so
                host,
                int(port),
                place.size,
                is_first,
                patience,
                wait_for_workers=False,
                master_listen_fd=listen(host, int(port)) if is_first else None,
            )
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
