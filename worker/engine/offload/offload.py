"""KV offload of an engine as a whole: the blocks' identity, the tiers, and the threads that write and read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import structlog

from ....shared.stats.kv_offload import KVOffloadStats
from .loading import Loader
from .tiers import Tiers
from .write_behind import WriteBehind

# Limit on the time to write pending blocks when the engine stops.
_CLOSE_TIMEOUT_S = 5.0

log = structlog.get_logger(__name__)


class KVOffload:
    """Composition of the parts.

    Args:
        read_identity: reads all weights and returns the identity of their blocks; None if the weights are unloaded.
    """

    def __init__(
        self, tiers: Tiers, write_behind: WriteBehind, loader: Loader, read_identity: Callable[[], bytes | None]
    ) -> None:
        self._tiers = tiers
        self.write_behind = write_behind
        self.loader = loader
        self._read_identity = read_identity

    def renew_identity(self) -> None:
        """Read the identity again, since the weights may have changed: at the start, after a sleep, after a reset.

        No load or write may be in progress.
        """
        self.write_behind.stop()
        identity = self._read_identity()
        self._tiers.use(identity)
        log.info("kv_offload", identity=None if identity is None else identity.hex())

    def look_up(self, hashes: Sequence[bytes], block_size: int) -> int:
        """Return how many of the blocks ``hashes``, from the first on, can be read."""
        self._tiers.counters.num_queried_tokens += len(hashes) * block_size
        return self._tiers.find(hashes)

    def note_loaded(self, num_tokens: int) -> None:
        """Count tokens that were read instead of computed."""
        self._tiers.counters.num_hit_tokens += num_tokens

    def clear(self) -> None:
        """Forget the blocks of this identity, and read it again, since weights may have been changed in place."""
        self._tiers.clear()
        self.renew_identity()

    def stats(self) -> KVOffloadStats:
        """Return statistics; see ``KVOffloadStats``."""
        counters = self._tiers.counters
        return KVOffloadStats(
            num_queried_tokens=counters.num_queried_tokens,
            num_hit_tokens=counters.num_hit_tokens,
            num_read_bytes=counters.num_read_bytes,
            num_written_bytes=counters.num_written_bytes,
            num_dropped_blocks=counters.num_dropped_blocks,
            num_corrupt_blocks=counters.num_corrupt_blocks,
            memory_bytes=self._tiers.num_memory_bytes,
            dir_bytes=self._tiers.num_dir_bytes,
        )

    def close(self) -> None:
        """Write the pending blocks, within a time limit."""
        self.write_behind.finish(_CLOSE_TIMEOUT_S)
