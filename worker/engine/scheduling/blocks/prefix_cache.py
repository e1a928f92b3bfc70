"""Automatic prefix caching: a request does not compute again what another one that began alike left in the KV cache.

Blocks are known by a chained hash: that of a full block covers its own tokens and, by the hash of the block before it,
all tokens in front of them, since keys and values depend on those too. The chain begins with the request's
``extra_keys``, so requests that differ there (another tenant, another cache salt) never find each other's blocks. The
hash of a block that holds some of an image covers the image, too (``image_spans.py``).

A block can be found once its tokens have been computed: after the step, not when it is scheduled. Of requests that
begin alike and come together, those that catch up in one step compute it each; the next one waits a step and finds it.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable
from typing import Protocol

import msgspec

from ..image_spans import block_keys, whole_hit
from ..request import Request, RequestStatus
from .block_pool import BlockPool, InvariantError


class PrefixCache(Protocol):
    """What the scheduler asks.

    Attributes:
        num_queried_tokens: tokens of all requests that looked for cached ones, each counted when first admitted.
        num_hit_tokens: how many of them were there.
    """

    num_queried_tokens: int
    num_hit_tokens: int

    def find(self, request: Request) -> list[int]:
        """The blocks that hold the beginning of ``request``, always without its last token, whose logits are wanted."""
        ...

    def is_being_computed(self, request: Request, num_tokens: int, work: Iterable[tuple[Request, int]]) -> bool:
        """Whether ``work``, the step as scheduled so far, computes the blocks of the first ``num_tokens`` tokens of
        ``request`` for another one. To be asked after ``find``.
        """
        ...

    def note_admission(self, request: Request) -> None:
        """Count what an admitted request has found: its ``num_computed_tokens``."""
        ...

    def note_computed(self, request: Request, num_new_tokens: int) -> None:
        """Let others find the blocks that the last ``num_new_tokens`` computed tokens of ``request`` have filled; to be
        called if there are any.
        """
        ...

    def check_invariants(self, running: Iterable[Request]) -> None:
        """Verify that what is found by a hash is what the requests that hold it say.

        Raises:
            InvariantError: a block of a running request is known by another hash than it should be.
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

    def note_admission(self, request: Request) -> None:
        pass

    def note_computed(self, request: Request, num_new_tokens: int) -> None:
        pass

    def check_invariants(self, running: Iterable[Request]) -> None:
        pass


class BlockHashCache:
    """Finds and names the blocks of ``block_pool`` by what is in them."""

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
        found = self._pool.find(request.block_hashes[:num_blocks])
        return found[: whole_hit(request.images, len(found), self._block_size)] if request.images else found

    def is_being_computed(self, request: Request, num_tokens: int, work: Iterable[tuple[Request, int]]) -> bool:
        last = (num_tokens - 1) // self._block_size
        if not request.reads_prefix_cache or last >= len(request.block_hashes):
            return False
        # The hash of the last block speaks for all before it.
        wanted = request.block_hashes[last : last + 1]
        for other, num_new_tokens in work:
            first = other.num_computed_tokens // self._block_size
            end = (other.num_computed_tokens + other.num_in_flight_tokens + num_new_tokens) // self._block_size
            if first <= last < end and other.block_hashes[last : last + 1] == wanted:
                return True
        return False

    def note_admission(self, request: Request) -> None:
        # One that was preempted was counted when it came first: what it finds again of its own is no saving.
        if request.reads_prefix_cache and request.status is RequestStatus.WAITING:
            self.num_queried_tokens += request.num_tokens
            self.num_hit_tokens += request.num_computed_tokens
            # Of a resumed request, tokens that were delivered before may have been found too.
            request.num_cached_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)

    def note_computed(self, request: Request, num_new_tokens: int) -> None:
        first = (request.num_computed_tokens - num_new_tokens) // self._block_size
        end = request.num_computed_tokens // self._block_size
        self._hash_blocks(request, end)
        for index in range(first, end):
            self._pool.set_hash(request.block_table[index], request.block_hashes[index])

    def check_invariants(self, running: Iterable[Request]) -> None:
        for request in running:
            num_full = request.num_computed_tokens // self._block_size
            for index, block in enumerate(request.block_table):
                known = self._pool.hash_of(block)
                if known is not None and (index >= num_full or known != request.block_hashes[index]):
                    raise InvariantError(f"block {block} of request {request.request_id} is known by a wrong hash")

    def _hash_blocks(self, request: Request, num_blocks: int) -> None:
        """Extend ``block_hashes`` to the first ``num_blocks`` blocks, whose tokens are known.

        0.75 us per block of 16 tokens, 1.65 us per block of 64 (a shared 2-core machine), most of it the call; blake2b,
        blake2s and md5 take as long. 256 bits: nobody can make two prompts with one hash, so no tokens are compared.
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
    """What stands before the first block. Another function than for blocks: no salt can be made to look like one."""
    return hashlib.blake2b(msgspec.msgpack.encode(extra_keys), digest_size=32).digest()
