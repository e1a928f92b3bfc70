"""Automatic prefix caching: a request reuses KV-cache blocks of earlier requests that began with the same tokens.

Blocks are identified by a chained hash: the hash of a full block covers its own tokens and, through the hash of the
previous block, all tokens before them, since keys and values depend on those too. The chain begins with the request's
``extra_keys``, so requests that differ there (another tenant, another cache salt) never find each other's blocks. The
hash of a block that holds part of an image also covers the image (``prompt_inputs.py``).

A block can be found after the step that computes its tokens, not when that step is scheduled. If requests with the same
beginning arrive together, each one that catches up in the same step computes the block; the next one waits a step and
finds it.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable
from typing import Protocol

import msgspec

from .block_pool import BlockGroups, BlockPool, InvariantError, group_key
from .prompt_inputs import block_keys, uncut_hit
from .request import Request, RequestStatus


class PrefixCache(Protocol):
    """Finds cached blocks for the scheduler.

    Attributes:
        num_queried_tokens: tokens of all requests that may use cached ones, each counted when first admitted.
        num_hit_tokens: how many of them were cached.
    """

    num_queried_tokens: int
    num_hit_tokens: int

    def find(self, request: Request) -> list[int]:
        """Return the cached blocks of the beginning of ``request``, without its last token, which needs logits."""
        ...

    def is_being_computed(self, request: Request, num_tokens: int, work: Iterable[tuple[Request, int]]) -> bool:
        """Return whether ``work``, the step as scheduled so far, computes the blocks of the first ``num_tokens`` tokens
        of ``request`` for another one. Call ``find`` first.
        """
        ...

    def record_admission(self, request: Request) -> None:
        """Count the cached tokens of an admitted request: its ``num_computed_tokens``."""
        ...

    def record_computed(self, request: Request, num_new_tokens: int) -> None:
        """Make the blocks findable that the last ``num_new_tokens`` computed tokens of ``request`` have filled. Call it
        only if there are such blocks.
        """
        ...

    def check_invariants(self, running: Iterable[Request]) -> None:
        """Verify that blocks' hashes match the requests that hold them.

        Raises:
            InvariantError: a block of a running request has a wrong hash.
        """
        ...


class NoPrefixCache:
    """Every request computes all its tokens."""

    num_queried_tokens = 0
    num_hit_tokens = 0

    def find(self, request: Request) -> list[int]:
        return []

    def is_being_computed(self, request: Request, num_tokens: int, work: Iterable[tuple[Request, int]]) -> bool:
        return False

    def record_admission(self, request: Request) -> None:
        pass

    def record_computed(self, request: Request, num_new_tokens: int) -> None:
        pass

    def check_invariants(self, running: Iterable[Request]) -> None:
        pass


class BlockHashCache:
    """Identifies the blocks of ``block_pool`` by a hash of their contents."""

    def __init__(self, block_pool: BlockPool) -> None:
        self._pool = block_pool
        self._block_size = block_pool.block_size
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0

    def find(self, request: Request) -> list[int]:
        if not request.reads_prefix_cache:
            return []
        num_blocks = (request.num_tokens - 1) // self._block_size
        self._hash_blocks(request, num_blocks)
        blocks = self._pool.find(request.block_hashes[:num_blocks])
        return blocks[: uncut_hit(request.images, len(blocks), self._block_size)] if request.images else blocks

    def is_being_computed(self, request: Request, num_tokens: int, work: Iterable[tuple[Request, int]]) -> bool:
        last = (num_tokens - 1) // self._block_size
        if not request.reads_prefix_cache or last >= len(request.block_hashes):
            return False
        # The hash of the last block covers all blocks before it.
        last_hash = request.block_hashes[last : last + 1]
        for other, num_new_tokens in work:
            first = other.num_computed_tokens // self._block_size
            end = (other.num_computed_tokens + other.num_in_flight_tokens + num_new_tokens) // self._block_size
            if first <= last < end and other.block_hashes[last : last + 1] == last_hash:
                return True
        return False

    def record_admission(self, request: Request) -> None:
        # A preempted request was counted on its first admission: finding its own blocks again saves nothing.
        if request.reads_prefix_cache and request.status is RequestStatus.WAITING:
            self.num_queried_tokens += request.num_tokens
            self.num_hit_tokens += request.num_computed_tokens
            # The hit of a resumed request may include tokens that were delivered before.
            request.num_cached_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)

    def record_computed(self, request: Request, num_new_tokens: int) -> None:
        first = (request.num_computed_tokens - num_new_tokens) // self._block_size
        end = request.num_computed_tokens // self._block_size
        self._hash_blocks(request, end)
        for index in range(first, end):
            self._pool.set_hash(request.block_table[index], request.block_hashes[index])

    def check_invariants(self, running: Iterable[Request]) -> None:
        for request in running:
            num_full = request.num_computed_tokens // self._block_size
            for index, block in enumerate(request.block_table):
                block_hash = self._pool.hash_of(block)
                if block_hash is not None and (index >= num_full or block_hash != request.block_hashes[index]):
                    raise InvariantError(f"block {block} of request {request.request_id} has a wrong hash")

    def _hash_blocks(self, request: Request, num_blocks: int) -> None:
        """Extend ``block_hashes`` to the first ``num_blocks`` blocks, whose tokens are known.

        Takes 0.75 us per block of 16 tokens, 1.65 us per block of 64 (a shared 2-core machine), most of it the call;
        blake2b, blake2s and md5 take as long. 256 bits, so that no client can construct two prompts with one hash, and
        tokens need not be compared.
        """
        hashes, block_size = request.block_hashes, self._block_size
        if num_blocks <= len(hashes):
            return
        tokens = array("i", request.token_ids[len(hashes) * block_size : num_blocks * block_size])
        data, num_bytes = tokens.tobytes(), block_size * tokens.itemsize
        parent = hashes[-1] if hashes else _root(request.extra_keys)
        keys = block_keys(request.images, block_size, len(hashes), num_blocks) if request.images else {}
        for start in range(0, len(data), num_bytes):
            content = data[start : start + num_bytes]
            if keys:
                content += keys.get(len(hashes), b"")
            parent = hashlib.sha256(parent + content).digest()
            hashes.append(parent)


def _root(extra_keys: tuple[str | None, ...]) -> bytes:
    """Return the parent hash of the first block. Not sha256, so that no salt can collide with a block's hash."""
    return hashlib.blake2b(msgspec.msgpack.encode(extra_keys), digest_size=32).digest()


class GroupHashCache(BlockHashCache):
    """A ``BlockHashCache`` per group of layers. A hit is a prefix from which all groups can continue.

    Layers without a window need all blocks of the prefix, and layers with a window the blocks that the next token
    attends to.
    """

    def __init__(self, block_pool: BlockPool, groups: BlockGroups) -> None:
        super().__init__(block_pool)
        self._groups = groups
        self._null_block = block_pool.num_blocks

    def find(self, request: Request) -> list[int]:
        """Return the blocks of the first group, after null blocks if it has a window. Each other group has as many."""
        if not request.reads_prefix_cache:
            return []
        num_blocks = (request.num_tokens - 1) // self._block_size
        self._hash_blocks(request, num_blocks)
        hashes = request.block_hashes[:num_blocks]
        count = self._num_cached(hashes)
        while request.images and (whole := uncut_hit(request.images, count, self._block_size)) < count:
            count = self._num_cached(hashes[:whole])
        first = self._groups.first_needed(self._groups.windows[0], count * self._block_size)
        return [self._null_block] * first + self._pool.find(hashes[first:count])

    def record_computed(self, request: Request, num_new_tokens: int) -> None:
        first = (request.num_computed_tokens - num_new_tokens) // self._block_size
        end = request.num_computed_tokens // self._block_size
        self._hash_blocks(request, end)
        for group, table in enumerate(_tables_of(request)):
            for index in range(first, end):
                self._pool.set_hash(table[index], group_key(request.block_hashes[index], group))

    def check_invariants(self, running: Iterable[Request]) -> None:
        for request in running:
            num_full = request.num_computed_tokens // self._block_size
            for group, table in enumerate(_tables_of(request)):
                for index, block in enumerate(table):
                    block_hash = None if block == self._null_block else self._pool.hash_of(block)
                    is_correct = index < num_full and block_hash == group_key(request.block_hashes[index], group)
                    if block_hash is not None and not is_correct:
                        raise InvariantError(f"block {block} of request {request.request_id} has a wrong hash")

    def _num_cached(self, hashes: list[bytes]) -> int:
        """Return how many of the first blocks are cached in all groups that need them."""
        count = len(hashes)
        for group, window in enumerate(self._groups.windows):
            if window is None:
                count = len(self._pool.find(group_key(block_hash, group) for block_hash in hashes[:count]))
        windowed = [(group, window) for group, window in enumerate(self._groups.windows) if window is not None]
        while count:
            missing = self._last_missing(hashes, count, windowed)
            if missing is None:
                break
            # Every count above ``missing`` needs this block, so continue with the blocks before it.
            count = missing
        return count

    def _last_missing(self, hashes: list[bytes], count: int, windowed: list[tuple[int, int]]) -> int | None:
        """Return the index of a block that a group needs to continue after ``count`` but lacks; None if it has all."""
        for group, window in windowed:
            first = self._groups.first_needed(window, count * self._block_size)
            for index in range(count - 1, first - 1, -1):
                if not self._pool.find((group_key(hashes[index], group),)):
                    return index
        return None


def _tables_of(request: Request) -> list[list[int]]:
    return [] if request.group_tables is None else request.group_tables.tables
