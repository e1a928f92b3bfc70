"""The ranks of a data-parallel group, as torch has them: who they are, and what they say to each other."""

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

# The slowest rank's loading, which the others wait for at their first collective.
LOAD_TIMEOUT_S = 1800.0


class ExpertRanks:
    """This process's part in a group whose ranks meet in each forward.

    All collectives wait for the others. Each raises ``GroupBrokenError`` once one is gone, or silent for too long.
    """

    def __init__(self, place: RankPlace) -> None:
        self.rank, self.size = place.rank, place.size
        self._timeout_s = place.timeout_s
        self._communicator = Communicator()

    @classmethod
    def meet(cls, place: RankPlace, device: str, own_address: str = "") -> ExpertRanks:
        """Find the other ranks of the same generation; returns when all are there.

        Args:
            own_address: of this host, at which the others reach this rank; empty if it is that of ``place``.

        Raises:
            GroupBrokenError: they do not come.
        """
        host, _, port = place.address.rpartition(":")
        is_first = place.rank == 0
        patience = timedelta(seconds=LOAD_TIMEOUT_S)
        try:
            choose_interface(own_address or host)
            # Whoever comes first waits for the first rank to listen; its worker process knows better whether it will.
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
                # Whoever still is of another generation has other keys, should it get here at all.
                store=PrefixStore(f"{place.generation}", store),
                rank=place.rank,
                world_size=place.size,
                timeout=patience,
            )
        except (RuntimeError, ValueError, OSError) as error:
            raise GroupBrokenError(f"the ranks of the group have not met at {place.address}: {error}") from error
        return cls(place)

    def settle(self) -> None:
        """All is loaded: from now on a rank that is silent for the group's time-out is gone."""
        try:
            # What `new_group` returns has no public type.
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
        """Return when all have come here, or one is gone: whom a rank leaves before they have met it miss it."""
        with suppress(GroupBrokenError):
            self.sum_of(torch.zeros(1, dtype=torch.int64))

    def gather_rows(self, rows: Tensor, num_rows: list[int]) -> Tensor:
        """Return the rows of all ranks below each other, ``[sum(num_rows), ...]``; ``rows`` are those of this one.

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
        """Return what each rank has for ``number``."""
        mine = torch.zeros(self.size, dtype=torch.int64, device=device)
        mine[self.rank] = number
        return self.sum_of(mine).tolist()


def _broken(error: RuntimeError) -> GroupBrokenError:
    first = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return GroupBrokenError(f"a rank of the group is gone or says nothing: {first}")
