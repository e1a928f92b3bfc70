"""Format of a KV block in a file: a header that identifies and verifies the block, and its bytes.

The checksum is CRC-32, which detects any flipped byte and takes a third of the time of SHA-256. It protects against
disk errors and torn writes. Everyone with write access to the folder is trusted, as with the model's files.
"""

from __future__ import annotations

import struct
import zlib

import numpy as np
from numpy.typing import NDArray

# Bytes of a block: its parts in the caches of all layers, concatenated.
Row = NDArray[np.uint8]

_MAGIC = b"penstkv\x01"  # the last byte is the header's version
# Magic, identity, hash of the block, number of bytes that follow, their checksum.
_HEADER = struct.Struct("<8s32s32sQI")
HEADER_BYTES = _HEADER.size


class CorruptBlockError(Exception):
    """A block that was read differs from the block that was written; the message says how."""


def checksum(row: Row) -> int:
    """Return the CRC-32 of a block."""
    return zlib.crc32(row.data)


def make_header(identity: bytes, block_hash: bytes, row: Row) -> bytes:
    """Return the header of ``row`` in a file."""
    return _HEADER.pack(_MAGIC, identity, block_hash, row.nbytes, checksum(row))


def check_record(header: bytes, identity: bytes, block_hash: bytes, row: Row) -> None:
    """Verify that ``row``, read after ``header``, is the block ``block_hash`` of ``identity``.

    Raises:
        CorruptBlockError: it is not.
    """
    if len(header) < HEADER_BYTES:
        raise CorruptBlockError("the file ends within its header")
    magic, stored_identity, stored_hash, num_bytes, stored_checksum = _HEADER.unpack(header)
    if magic != _MAGIC or stored_identity != identity or stored_hash != block_hash or num_bytes != row.nbytes:
        raise CorruptBlockError("the header belongs to another block")
    if stored_checksum != checksum(row):
        raise CorruptBlockError("checksum mismatch")
