"""The client's methods for workers: draining, stopping and scaling them."""

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
    """The part of the client for workers. ``worker_id`` is as in ``engines`` and ``worker list``.

    All engines of a worker leave with it. Its requests resume at other engines, or wait for one.
    """

    async def drain_worker(self, worker_id: str, *, timeout_s: float = DRAIN_TIMEOUT_S) -> None:
        """Have a worker claim no more requests, finish the running ones and leave. Return once it has left.

        Args:
            timeout_s: after it the worker requeues the requests that still run; at most the worker's own
                ``--drain-timeout``.

        Raises:
            ValidationError: the worker does not exist, or ``timeout_s`` is invalid.
            PenstockError: the worker has not left 15 s after the timeout.
        """
        check_timeout("timeout_s", timeout_s)
        async with self._operations.audit.audited("worker.drain", worker_id, timeout_s=timeout_s):
            await self._make_leave(worker_id, DrainCommand(timeout_s=timeout_s), timeout_s + MARGIN_S)

    async def stop_worker(self, worker_id: str) -> None:
        """Have a worker requeue its running requests and leave immediately. Return once it has left. Raises: as
        ``drain_worker``.
        """
        async with self._operations.audit.audited("worker.stop", worker_id):
            await self._make_leave(worker_id, StopCommand(), MARGIN_S)

    async def scale_worker(self, worker_id: str, num_engines: int, *, timeout_s: float = SCALE_TIMEOUT_S) -> None:
        """Have a worker serve with ``num_engines`` engines. Return once it does.

        Surplus engines drain before they stop, for at most the worker's ``--drain-timeout``. The number holds for the
        run of the worker: one that is started again has the number of its command line.

        Args:
            timeout_s: raise an error after this time, though the worker continues to scale.

        Raises:
            ValidationError: the worker does not exist, it has not enough capacity, or ``timeout_s`` is invalid.
            PenstockError: the worker does not serve with that number in time; says what its engines do.
        """
        check_timeout("timeout_s", timeout_s)
        async with self._operations.audit.audited("worker.scale", worker_id, num_engines=num_engines):
            await scale_worker(self._commands.execute, self._keys, worker_id, num_engines, timeout_s)

    async def _make_leave(self, worker_id: str, command: WorkerCommand, patience_s: float) -> None:
        worker_ids = await known_workers(self._commands.execute, self._keys)
        if worker_id not in worker_ids:
            names = ", ".join(sorted(worker_ids)) or "none (no worker runs)"
            raise ValidationError(f"worker_id must be one of {names}, got {shown(worker_id)}")
        await make_leave(self._commands.execute, self._keys, [worker_id], command, patience_s)
