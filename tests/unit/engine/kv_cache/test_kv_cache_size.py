"""The number of blocks that an engine gets, and its message when they are too few."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.shared.errors import ConfigurationError, DeviceMemoryError
from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.engine.execution.kv_cache import KVCacheSize, check_room, size_kv_cache

MIB = 1 << 20


def size(
    max_model_len: int = 64,
    is_length_chosen: bool = False,
    bytes_per_token: int = 1024,
    bytes_per_request: int = 0,
    **options: Any,
) -> KVCacheSize:
    """With 16 MiB free, 1 KiB per token, blocks of 16 tokens: 16 KiB per block."""
    config = EngineConfig(model="m", **options)
    return size_kv_cache(
        config,
        bytes_per_token=bytes_per_token,
        bytes_per_request=bytes_per_request,
        free_bytes=16 * MIB,
        max_model_len=max_model_len,
        is_length_chosen=is_length_chosen,
    )


@pytest.mark.parametrize(
    ("options", "num_blocks"),
    [
        ({}, 256),
        ({"max_num_seqs": 500, "max_num_batched_tokens": 500}, int(0.4 * 1024)),
        ({"max_num_seqs": 500, "max_num_batched_tokens": 500, "num_engines_on_host": 2}, int(0.2 * 1024)),
        ({"max_num_seqs": 500, "max_num_batched_tokens": 500, "gpu_memory_utilization": 0.5}, 512),
        ({"kv_cache_memory": MIB}, 64),
        ({"max_num_seqs": 1}, 4),
    ],
)
def test_number_of_blocks(options: dict[str, Any], num_blocks: int) -> None:
    assert size(**options).num_blocks == num_blocks


def test_a_gpu_is_not_shared_between_the_engines_of_a_host() -> None:
    options = {"device": "cuda", "num_engines_on_host": 8, "max_num_seqs": 500, "max_num_batched_tokens": 500}
    assert size(**options).num_blocks == int(0.9 * 1024)


def test_a_standby_leaves_room_for_the_largest_step() -> None:
    check_room(2 * MIB, 2 * MIB)
    with pytest.raises(DeviceMemoryError, match=r"beside the standby 1 MiB of the device are free.*serves takes 2 MiB"):
        check_room(MIB, 2 * MIB)


def test_a_cache_that_is_allocated_later_need_not_be_free_now() -> None:
    with pytest.raises(DeviceMemoryError):
        size(kv_cache_memory=20 * MIB, max_model_len=10**6)
    assert size(kv_cache_memory=20 * MIB, max_model_len=10**6, defers_cache=True).num_blocks == 20 * 64


def test_the_models_limit_is_lowered_to_the_cache() -> None:
    assert size(max_model_len=10**6, kv_cache_memory=MIB).max_model_len == 1024


def test_a_requested_limit_is_not_lowered() -> None:
    with pytest.raises(ConfigurationError, match=r"1 MiB \(kv_cache_memory\).*2048 needs 2 MiB: lower max_model_len"):
        size(max_model_len=2048, is_length_chosen=True, kv_cache_memory=MIB)


def test_no_room_for_a_single_block() -> None:
    expected = (
        r"may take 1 KiB \(kv_cache_memory\), but a block of 16 tokens needs 16 KiB: raise kv_cache_memory or lower b"
    )
    with pytest.raises(ConfigurationError, match=expected):
        size(kv_cache_memory=1024)


def test_no_room_for_a_prompt_and_an_output_token() -> None:
    with pytest.raises(
        ConfigurationError, match=r"one request of max_model_len 64 needs 64 KiB: raise kv_cache_memory"
    ):
        size(kv_cache_memory=1024, block_size=1)


def test_more_than_is_free_is_refused_unless_it_is_not_used() -> None:
    with pytest.raises(
        ConfigurationError, match="KV cache take 32 MiB, but 16 MiB is free: lower kv_cache_memory or max"
    ):
        size(kv_cache_memory=32 * MIB, max_model_len=1 << 15, max_num_seqs=8)
    assert size(kv_cache_memory=32 * MIB).num_blocks == 256


def test_states_of_the_maximum_batch_are_reserved_first() -> None:
    # Of 4 MiB, eight requests take an eighth of a MiB each.
    with_states = size(kv_cache_memory=4 * MIB, max_num_seqs=8, max_model_len=1024, bytes_per_request=MIB // 8)
    assert with_states.num_blocks == 3 * 64


def test_no_memory_left_after_the_states() -> None:
    with pytest.raises(ConfigurationError, match=r"4 MiB \(kv_cache_memory\), but the states of 8 requests need 4 MiB"):
        size(kv_cache_memory=4 * MIB, max_num_seqs=8, bytes_per_request=MIB // 2)


def test_a_model_without_keys_is_bounded_by_its_requests() -> None:
    assert size(bytes_per_token=0, bytes_per_request=1024, max_num_seqs=8).num_blocks == 8 * 4
