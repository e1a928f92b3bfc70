"""What a client may have workers do: finish and leave, or leave at once."""

from __future__ import annotations

from ...shared.deployment.leave import MARGIN_S, known_workers, make_leave
from ...shared.deployment.scaling import scale_worker
from ...shared.errors import ValidationError
from ...shared.messages.commands import DrainCommand, StopCommand, WorkerCommand
from ...shared.values.shown import shown
from ...shared.values.timeouts import check_timeout
from ..client_core import ClientCore

DRAIN_TIMEOUT_S = 30.0
SCALE_TIMEOUT_S = 300.0


class WorkerControl(ClientCore):
    """The part of the client that is about workers: ``worker_id`` is as ``engines`` and ``worker list`` tell it.

    All engines of a worker leave with it. Its requests go on at others, or wait for some.
    """

    async def drain_worker(self, worker_id: str, *, timeout_s: float = DRAIN_TIMEOUT_S) -> None:
        """Have a worker take no more requests, finish what runs and leave; returns when it is gone.

        Args:
            timeout_s: after which it hands back what still runs; at most the worker's own ``--drain-timeout``.

        Raises:
            ValidationError: no such worker is there, or ``timeout_s`` is no time.
            PenstockError: it is still there 15 s after the time limit.
        """
        check_timeout("timeout_s", timeout_s)
        async with self._operations.audit.audited("worker.drain", worker_id, timeout_s=timeout_s):
            await self._make_leave(worker_id, DrainCommand(timeout_s=timeout_s), timeout_s + MARGIN_S)

    async def stop_worker(self, worker_id: str) -> None:
        """Have a worker hand back what runs and leave at once; returns when it is gone. Raises as ``drain_worker``."""
        async with self._operations.audit.audited("worker.stop", worker_id):
            await self._make_leave(worker_id, StopCommand(), MARGIN_S)

    async def scale_worker(self, worker_id: str, num_engines: int, *, timeout_s: float = SCALE_TIMEOUT_S) -> None:
        """Have a worker serve with so many engines; returns when it does.

        Those beyond drain before they go, as long as the worker's ``--drain-timeout``. The number lasts as long as the
        worker: one that is started again has what its command line says.

        Args:
            timeout_s: after which it is an error, though the worker goes on with it.

        Raises:
            ValidationError: no such worker is there, it has no room for so many, or ``timeout_s`` is no time.
            PenstockError: it does not serve so by then; says what its engines do.
        """
        check_timeout("timeout_s", timeout_s)
        async with self._operations.audit.audited("worker.scale", worker_id, num_engines=num_engines):
            await scale_worker(self._commands.execute, self._keys, worker_id, num_engines, timeout_s)

    async def _make_leave(self, worker_id: str, command: WorkerCommand, patience_s: float) -> None:
        known = await known_workers(self._commands.execute, self._keys)
        if worker_id not in known:
            raise ValidationError(
                f"worker_id must be one of {', '.join(sorted(known)) or 'none that is there'}, got {shown(worker_id)}"
            )
        await make_leave(self._commands.execute, self._keys, [worker_id], command, patience_s)
