"""A KV block outside of the KV cache: its bytes, and a header by which they are known to be whole and the right ones.

The checksum is CRC-32, which finds any flipped byte and takes a third of the time of SHA-256. It guards against disks
and torn writes; whoever may write into the folder is trusted, as with the model's files.
"""

from __future__ import annotations

import struct
import zlib

import numpy as np
from numpy.typing import NDArray

# A block's bytes, as they lie in the caches of all layers, one after the other.
Row = NDArray[np.uint8]

_MAGIC = b"penstkv\x01"  # the last byte is the header's version
# Magic, identity, hash of the block, bytes that follow, their checksum.
_HEADER = struct.Struct("<8s32s32sQI")
HEADER_BYTES = _HEADER.size


class CorruptBlockError(Exception):
    """What was read is not the block that had been written; the message says in what."""


def checksum(row: Row) -> int:
    """CRC-32 of a block."""
    return zlib.crc32(row.data)


def make_header(identity: bytes, block_hash: bytes, row: Row) -> bytes:
    """What stands before ``row`` in a file."""
    return _HEADER.pack(_MAGIC, identity, block_hash, row.nbytes, checksum(row))


def check_record(header: bytes, identity: bytes, block_hash: bytes, row: Row) -> None:
    """Verify that ``row``, read behind ``header``, is the block ``block_hash`` of the engine's ``identity``.

    Raises:
        CorruptBlockError: it is not.
    """
    if len(header) < HEADER_BYTES:
        raise CorruptBlockError("it ends within its header")
    magic, found_identity, found_hash, num_bytes, found_checksum = _HEADER.unpack(header)
    if magic != _MAGIC or found_identity != identity or found_hash != block_hash or num_bytes != row.nbytes:
        raise CorruptBlockError("its header is of another block")
    if found_checksum != checksum(row):
        raise CorruptBlockError("its checksum is of other bytes")
