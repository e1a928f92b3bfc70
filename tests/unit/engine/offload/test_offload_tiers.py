"""Tiers that keep KV blocks outside the cache: bounds, order, damage, sharing, and full disks."""

from __future__ import annotations

import hashlib
import os
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from structlog.testing import capture_logs

from penstock.worker.engine.offload import folder_tier
from penstock.worker.engine.offload.folder_tier import HEADER_BYTES, CorruptBlockError, FolderTier, Row
from penstock.worker.engine.offload.tiers import MemoryTier, Tiers

BLOCK_BYTES = 512
FILE_BYTES = HEADER_BYTES + BLOCK_BYTES
OURS, OTHERS = b"\1" * 32, b"\2" * 32


def hash_of(number: int) -> bytes:
    return hashlib.sha256(bytes([number])).digest()


def row_of(number: int) -> Row:
    return np.random.default_rng(number).integers(0, 256, BLOCK_BYTES, np.uint8)


def folder_of(path: Path, num_files: int = 100, identity: bytes = OURS) -> FolderTier:
    tier = FolderTier(path, num_files * FILE_BYTES, BLOCK_BYTES)
    tier.use(identity)
    return tier


def files(path: Path) -> list[Path]:
    return sorted(path.glob("blocks/*/*/*"))


def read(tier: FolderTier | MemoryTier | Tiers, number: int) -> bool:
    """Whether it has the block, and as it was."""
    out = np.zeros(BLOCK_BYTES, np.uint8)
    is_hit = tier.read(hash_of(number), out)
    assert not is_hit or (out == row_of(number)).all()
    return is_hit


def test_blocks_in_memory_are_readable_until_evicted() -> None:
    tier = MemoryTier(3 * BLOCK_BYTES + 1, BLOCK_BYTES)
    for number in (1, 2, 3):
        tier.put(hash_of(number), row_of(number))
    assert tier.num_bytes == 3 * BLOCK_BYTES
    assert read(tier, 1)
    tier.put(hash_of(4), row_of(4))
    assert [read(tier, number) for number in (1, 2, 3, 4)] == [True, False, True, True]
    tier.clear()
    assert not any(hash_of(number) in tier for number in range(5))
    tier.put(hash_of(5), row_of(5))
    assert read(tier, 5)


def test_memory_that_has_changed_is_not_read() -> None:
    tier = MemoryTier(BLOCK_BYTES, BLOCK_BYTES)
    tier.put(hash_of(1), row_of(1))
    tier._rows[0, 77] ^= 1
    with pytest.raises(CorruptBlockError, match="checksum"):
        read(tier, 1)
    assert not read(tier, 1)
    tier.put(hash_of(1), row_of(1))
    assert read(tier, 1)


def test_a_folder_outlives_its_writer_and_is_shared(tmp_path: Path) -> None:
    first, second = folder_of(tmp_path), folder_of(tmp_path)
    assert first.write(hash_of(1), row_of(1))
    assert not first.write(hash_of(1), row_of(1)), "it is there"
    assert read(folder_of(tmp_path), 1), "by one that begins later"
    assert hash_of(1) not in second
    second.look_for_new()
    assert read(second, 1), "by one that was there already"
    assert not second.write(hash_of(1), row_of(1))
    assert len(files(tmp_path)) == 1


def test_blocks_of_another_identity_are_never_read(tmp_path: Path) -> None:
    folder_of(tmp_path).write(hash_of(1), row_of(1))
    other = folder_of(tmp_path, identity=OTHERS)
    assert hash_of(1) not in other
    assert not read(other, 1)
    # Not even if a user moves the file.
    (ours,) = files(tmp_path)
    theirs = tmp_path / "blocks" / OTHERS.hex() / ours.parent.name / ours.name
    theirs.parent.mkdir(parents=True)
    ours.rename(theirs)
    with pytest.raises(CorruptBlockError, match="another block"):
        read(folder_of(tmp_path, identity=OTHERS), 1)


@pytest.mark.parametrize(
    "damage",
    [
        *(pytest.param(("flip", at), id=f"byte {at}") for at in (0, 9, 45, 75, 82, HEADER_BYTES, FILE_BYTES - 1)),
        *(pytest.param(("cut", to), id=f"cut to {to}") for to in (0, 10, HEADER_BYTES, FILE_BYTES - 1)),
        pytest.param(("grow", 1), id="longer"),
    ],
)
def test_damage_is_detected_reported_and_repaired(tmp_path: Path, damage: tuple[str, int]) -> None:
    tier = folder_of(tmp_path)
    tier.write(hash_of(1), row_of(1))
    (file,) = files(tmp_path)
    content, (kind, at) = bytearray(file.read_bytes()), damage
    if kind == "flip":
        content[at] ^= 0x40
    file.write_bytes(content[:at] if kind == "cut" else bytes(content) + b"x" * (kind == "grow"))
    tiers = Tiers(None, tier)
    tiers.use(OURS)
    assert tiers.find([hash_of(1)]) == 1
    assert not read(tiers, 1)
    assert tiers.counters.num_corrupt_blocks == 1
    assert tiers.find([hash_of(1)]) == 0
    assert files(tmp_path) == []
    tiers.put(hash_of(1), row_of(1))
    assert read(tiers, 1)


def test_a_folder_keeps_its_limit_and_recently_used_blocks(tmp_path: Path) -> None:
    tier = folder_of(tmp_path, 3)
    for number in (1, 2, 3):
        tier.write(hash_of(number), row_of(number))
    assert read(tier, 1)
    for number in (4, 5):
        assert tier.write(hash_of(number), row_of(number))
        assert sum(file.stat().st_size for file in files(tmp_path)) <= 3 * FILE_BYTES
        assert tier.num_bytes == 3 * FILE_BYTES
    assert [read(tier, number) for number in (1, 2, 3, 4, 5)] == [True, False, False, True, True]


def test_engines_of_several_models_share_one_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_tier, "REREAD_S", 0.0)
    tier, other = folder_of(tmp_path, 3), folder_of(tmp_path, 3, OTHERS)
    for number in (1, 2):
        tier.write(hash_of(number), row_of(number))
    for number in (3, 4):
        assert other.write(hash_of(number), row_of(number))
    assert len(files(tmp_path)) == 3
    assert not read(tier, 1), "the oldest of all made room, and who wrote it finds it gone"
    assert read(tier, 2)
    # A file that another engine has used since is not the oldest any more. (Files of one clock tick would be as old.)
    for identity, number, seconds_ago in ((OURS, 2, 30), (OTHERS, 4, 20), (OTHERS, 3, 10)):
        used_ns = time.time_ns() - seconds_ago * 10**9
        os.utime(tmp_path / "blocks" / folder_tier.file_name(identity, hash_of(number)), ns=(used_ns, used_ns))
    assert tier.write(hash_of(5), row_of(5))
    assert (read(other, 3), read(other, 4), read(tier, 2)) == (True, True, False)


def test_writers_at_the_same_time_stay_within_the_bound(tmp_path: Path) -> None:
    engines = [folder_of(tmp_path, 10) for _ in range(4)]

    def write(tier: FolderTier, numbers: list[int]) -> None:
        for number in numbers:
            tier.write(hash_of(number), row_of(number))

    threads = [
        threading.Thread(target=write, args=(tier, [(place * 7 + number) % 40 for number in range(40)]))
        for place, tier in enumerate(engines)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(files(tmp_path)) == 10
    late = folder_of(tmp_path, 10)
    assert late.num_bytes == 10 * FILE_BYTES
    assert sum(read(late, number) for number in range(40)) == 10
    assert {tier.num_bytes for tier in engines} <= {9 * FILE_BYTES, 10 * FILE_BYTES}


def test_files_of_a_killed_writer_are_removed_and_recounted(tmp_path: Path) -> None:
    folder_of(tmp_path).write(hash_of(1), row_of(1))
    (file,) = files(tmp_path)
    left = file.with_name("left.kv.123.tmp")
    left.write_bytes(b"half")
    os.utime(left, (1, 1))
    (tmp_path / "usage").write_bytes((1 << 40).to_bytes(8, "little"))
    tier = folder_of(tmp_path, 2)
    assert not left.exists()
    assert tier.num_bytes == FILE_BYTES
    assert tier.write(hash_of(2), row_of(2))


@contextmanager
def no_file_may_be_larger(num_bytes: int) -> Iterator[None]:
    """Make the kernel refuse larger writes, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_tried_again_later(tmp_path: Path) -> None:
    tiers = Tiers(None, FolderTier(tmp_path, 100 * FILE_BYTES, BLOCK_BYTES))
    tiers.use(OURS)
    with no_file_may_be_larger(BLOCK_BYTES // 2), capture_logs() as events:
        tiers.put(hash_of(1), row_of(1))
    assert [line["event"] for line in events] == ["kv_offload_dir_unusable"]
    assert "File too large" in events[0]["reason"]
    assert not tiers.wants(hash_of(2)), "it is not even copied"
    assert tiers.counters.num_dropped_blocks == 2
    assert tiers.num_dir_bytes == 0
    assert not files(tmp_path)
    tiers._paused_until_s = 0.0
    assert tiers.wants(hash_of(3))
    tiers.put(hash_of(3), row_of(3))
    assert read(tiers, 3)


@pytest.mark.parametrize("has_memory", [False, True])
def test_a_folder_that_cannot_be_created_leaves_the_memory_tier(tmp_path: Path, has_memory: bool) -> None:
    (tmp_path / "file").write_text("no folder")
    memory = MemoryTier(4 * BLOCK_BYTES, BLOCK_BYTES) if has_memory else None
    tiers = Tiers(memory, FolderTier(tmp_path / "file", 100 * FILE_BYTES, BLOCK_BYTES))
    tiers.use(OURS)
    if tiers.wants(hash_of(1)):
        tiers.put(hash_of(1), row_of(1))
    assert tiers.find([hash_of(1)]) == has_memory
    assert read(tiers, 1) == has_memory
    assert tiers.counters.num_dropped_blocks == 1
    tiers.look_for_new()
    tiers.clear()


def test_blocks_read_from_the_folder_are_kept_in_memory(tmp_path: Path) -> None:
    folder_of(tmp_path).write(hash_of(1), row_of(1))
    memory = MemoryTier(4 * BLOCK_BYTES, BLOCK_BYTES)
    tiers = Tiers(memory, FolderTier(tmp_path, 100 * FILE_BYTES, BLOCK_BYTES))
    tiers.use(OURS)
    assert hash_of(1) not in memory
    assert read(tiers, 1)
    assert hash_of(1) in memory
    assert not tiers.wants(hash_of(1))
    tiers.use(OTHERS)
    assert hash_of(1) not in memory, "other weights"
    assert tiers.find([hash_of(1)]) == 0


def test_clearing_forgets_this_model_alone(tmp_path: Path) -> None:
    other = folder_of(tmp_path, identity=OTHERS)
    other.write(hash_of(1), row_of(1))
    memory, beside = MemoryTier(4 * BLOCK_BYTES, BLOCK_BYTES), folder_of(tmp_path)
    tiers = Tiers(memory, folder_of(tmp_path))
    tiers.use(OURS)
    tiers.put(hash_of(2), row_of(2))
    beside.write(hash_of(3), row_of(3))
    tiers.clear()
    assert tiers.find([hash_of(2)]) == 0
    assert len(files(tmp_path)) == 1
    assert read(other, 1)
    assert folder_of(tmp_path).num_bytes == FILE_BYTES
    assert not read(beside, 3)


def test_without_an_identity_nothing_is_kept() -> None:
    tiers = Tiers(MemoryTier(4 * BLOCK_BYTES, BLOCK_BYTES), None)
    assert not tiers.is_open
    assert tiers.find([hash_of(1)]) == 0
    tiers.use(OURS)
    tiers.put(hash_of(1), row_of(1))
    assert tiers.find([hash_of(1), hash_of(2), hash_of(1)]) == 1
    tiers.use(None)
    tiers.use(OURS)
    assert tiers.find([hash_of(1)]) == 0
