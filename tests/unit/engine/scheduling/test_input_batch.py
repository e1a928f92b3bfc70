"""The persistent batch: packing, rows that come and go, and slots."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.shared.params.sampling import SamplingParams
from penstock.worker.engine.execution.batch import InputBatch
from penstock.worker.engine.scheduling.block_pool import GroupTables
from penstock.worker.engine.scheduling.request import NO_LORA, Request
from penstock.worker.engine.scheduling.scheduler_output import SchedulerOutput


def make_request(
    request_id: str, token_ids: list[int], blocks: list[int], num_computed: int = 0, lora_index: int = NO_LORA
) -> Request:
    params = SamplingParams(max_tokens=None)
    request = Request(request_id, token_ids, params, max_model_len=12, lora_index=lora_index)
    request.block_table, request.num_computed_tokens = blocks, num_computed
    return request


def test_decodes_are_packed_before_prefill_chunks() -> None:
    batch = InputBatch(max_num_seqs=3, max_model_len=12, block_size=4)
    chunk = make_request("chunk", [1, 2, 3, 4, 5, 6, 7], [5, 0], num_computed=2)
    decode = make_request("decode", [8, 9, 10, 11, 12], [3, 7], num_computed=4)
    step = batch.prepare(SchedulerOutput([chunk, decode], [3, 1]))
    assert step.order.tolist() == [1, 0]
    assert step.token_ids.tolist() == [12, 3, 4, 5]
    assert step.positions.tolist() == [4, 2, 3, 4]
    assert step.slot_mapping.tolist() == [7 * 4, 5 * 4 + 2, 5 * 4 + 3, 0]
    assert step.query_lens.tolist() == [1, 3]
    assert step.seq_lens.tolist() == [5, 5]
    assert step.sampled.tolist() == [0], "the chunk does not reach the end of its prompt"
    assert step.logit_rows.tolist() == [0]


def test_sampled_tokens_are_the_next_input() -> None:
    batch = InputBatch(max_num_seqs=1, max_model_len=12, block_size=4)
    request = make_request("r", [1, 2, 3, 4], [2])
    step = batch.prepare(SchedulerOutput([request], [4]))
    batch.append_tokens(step.rows, np.array([9]))
    request.token_ids.append(9)
    request.num_computed_tokens = 4
    request.block_table.append(0)
    step = batch.prepare(SchedulerOutput([request], [1]))
    assert (step.token_ids.tolist(), step.positions.tolist(), step.slot_mapping.tolist()) == ([9], [4], [0])


def test_tokens_are_indices_until_they_are_received() -> None:
    """Late tokens of a row that another request has meanwhile belong to nobody."""
    batch = InputBatch(max_num_seqs=2, max_model_len=12, block_size=4)
    first, second = make_request("first", [1, 2], [0]), make_request("second", [3, 4, 5], [1])
    step = batch.prepare(SchedulerOutput([first, second], [2, 3]))
    expected = batch.expect_tokens(step.sampled_rows)
    first.num_in_flight_tokens, second.num_in_flight_tokens = 2, 3
    step = batch.prepare(SchedulerOutput([second, first], [1, 1]))
    assert (step.token_ids.tolist(), step.seq_lens.tolist()) == ([-1, -2], [4, 3])
    assert step.sampled.tolist() == [0, 1]
    third = make_request("third", [6, 7], [2])
    batch.prepare(SchedulerOutput([second, third], [1, 2], released_ids=["first"]))
    batch.receive_tokens(expected, np.array([8, 9]))
    assert batch.prepare(SchedulerOutput([second], [1])).token_ids.tolist() == [9]
    assert batch.prepare(SchedulerOutput([third], [2])).token_ids.tolist() == [6, 7]
    batch.forget_tokens(expected)
    assert batch.num_tokens.tolist() == [2, 3]


def test_a_row_is_reused_by_another_request() -> None:
    batch = InputBatch(max_num_seqs=1, max_model_len=12, block_size=4)
    batch.prepare(SchedulerOutput([make_request("old", [1, 2, 3, 4, 5], [2, 1])], [5]))
    step = batch.prepare(SchedulerOutput([make_request("new", [6, 7], [0])], [2], released_ids=["old", "unknown"]))
    assert (step.token_ids.tolist(), step.slot_mapping.tolist()) == ([6, 7], [0, 1])


def test_the_last_token_of_the_longest_request_has_no_place_and_needs_none() -> None:
    batch = InputBatch(max_num_seqs=1, max_model_len=12, block_size=4)
    step = batch.prepare(SchedulerOutput([make_request("r", [1] * 12, [0, 1, 2])], [12]))
    batch.append_tokens(step.rows, np.array([9]))
    assert batch.num_tokens.tolist() == [13]


def test_a_request_with_unsupported_parameters_takes_no_row() -> None:
    batch = InputBatch(max_num_seqs=1, max_model_len=12, block_size=4)
    misfit = make_request("misfit", [1, 2], [0])
    misfit.seed = 1 << 64
    for _ in range(2):
        with pytest.raises(OverflowError):
            batch.prepare(SchedulerOutput([misfit], [2]))
    step = batch.prepare(SchedulerOutput([make_request("next", [6, 7], [1])], [2]))
    assert step.token_ids.tolist() == [6, 7]


def test_a_block_table_that_grows_or_changes_is_followed_while_the_requests_stay_the_same() -> None:
    batch = InputBatch(max_num_seqs=2, max_model_len=12, block_size=4)
    requests = [make_request("a", [1, 2, 3, 4], [2]), make_request("b", [5, 6, 7, 8], [1])]
    step = batch.prepare(SchedulerOutput(requests, [4, 4]))
    for request in requests:
        request.token_ids.append(9)
        request.num_computed_tokens = 4
        request.block_table.append(3 if request.request_id == "b" else 5)
    batch.append_tokens(step.rows, np.array([9, 9]))
    step = batch.prepare(SchedulerOutput(requests, [1, 1]))
    assert step.slot_mapping.tolist() == [5 * 4, 3 * 4]
    batch.append_tokens(step.rows, np.array([9, 9]))
    # "b" has lost its blocks and got others in the same step, as many as it had before.
    requests[1].token_ids.append(9)
    requests[1].block_table, requests[1].num_computed_tokens = [4, 0], 0
    requests[0].token_ids.append(9)
    requests[0].num_computed_tokens = 5
    step = batch.prepare(SchedulerOutput(requests, [1, 6], released_ids=["b"]))
    assert step.slot_mapping.tolist() == [5 * 4 + 1, 16, 17, 18, 19, 0, 1]


def test_a_step_of_single_tokens_samples_only_where_they_are_the_last() -> None:
    batch = InputBatch(max_num_seqs=2, max_model_len=12, block_size=4)
    requests = [make_request("chunk", [1, 2, 3], [2]), make_request("last", [4], [1])]
    step = batch.prepare(SchedulerOutput(requests, [1, 1]))
    assert step.token_ids.tolist() == [1, 4]
    assert (step.sampled.tolist(), step.logit_rows.tolist()) == ([1], [1])
    assert step.sampled_rows.tolist() == [step.rows[1]]


def test_tokens_have_their_request_s_adapter_and_are_grouped_by_it() -> None:
    batch = InputBatch(max_num_seqs=4, max_model_len=12, block_size=4)
    adapted = make_request("adapted", [1, 2, 3], [5], lora_index=7)
    plain = make_request("plain", [4, 5], [0])
    decode = make_request("decode", [8, 9, 10, 11, 12], [3, 7], num_computed=4, lora_index=0)
    step = batch.prepare(SchedulerOutput([adapted, plain, decode], [3, 2, 1]))
    assert step.token_ids.tolist() == [12, 4, 5, 1, 2, 3]
    assert step.token_lora is not None
    assert (step.token_lora.tolist(), step.token_lora.dtype) == ([0, NO_LORA, NO_LORA, 7, 7, 7], np.int64)
    assert step.order.tolist() == [2, 1, 0]
    batch.append_tokens(step.sampled_rows, np.array([6, 6, 6]))
    for request, num_computed in ((adapted, 3), (plain, 2), (decode, 5)):
        request.token_ids.append(6)
        request.num_computed_tokens = num_computed
    step = batch.prepare(SchedulerOutput([adapted, plain, decode], [1, 1, 1]))
    assert step.token_lora is not None
    assert (step.token_lora.tolist(), step.order.tolist()) == ([NO_LORA, 0, 7], [1, 2, 0])
    assert step.sampled.tolist() == step.logit_rows.tolist() == [0, 1, 2]


def test_each_group_has_its_table_and_freed_pages_point_to_the_null_block() -> None:
    batch = InputBatch(max_num_seqs=2, max_model_len=12, block_size=4, num_groups=2)
    first, second = make_request("first", [1] * 9, []), make_request("second", [2], [])
    first.group_tables = GroupTables([[3, 4, 5], [6, 7, 8]], [0, 0])
    second.group_tables = GroupTables([[1], [2]], [0, 0])
    step = batch.prepare(SchedulerOutput([first, second], [9, 1]))
    assert step.group_slots is not None
    assert step.group_slots.tolist() == [[4, *range(12, 21)], [8, *range(24, 33)]]
    assert step.slot_mapping.tolist() == step.group_slots[0].tolist()
    first.num_computed_tokens, first.token_ids = 9, [1] * 10
    first.group_tables.tables[1][:2], first.group_tables.firsts[1], first.group_tables.version = [99, 99], 2, 1
    batch.prepare(SchedulerOutput([first], [1], released_ids=["second"]))
    assert batch.tables.tables is not None
    assert batch.tables.tables[:, 0].tolist() == [[3, 4, 5], [99, 99, 8]]
    third = make_request("third", [1] * 6, [], num_computed=4)
    third.group_tables = GroupTables([[10, 11], [99, 12]], [0, 1])
    step = batch.prepare(SchedulerOutput([first, third], [1, 2]))
    assert batch.tables.tables[:, 1, :2].tolist() == [[10, 11], [99, 12]]
    assert batch.block_table[1, :2].tolist() == [10, 11]


def test_a_step_without_adapters_has_no_column_whoever_else_has_a_row() -> None:
    batch = InputBatch(max_num_seqs=2, max_model_len=12, block_size=4)
    adapted, plain = make_request("adapted", [1], [5], lora_index=3), make_request("plain", [4], [0])
    assert batch.prepare(SchedulerOutput([adapted, plain], [1, 1])).token_lora is not None
    assert batch.prepare(SchedulerOutput([plain], [1])).token_lora is None
    # Another takes the row, then the first comes back, with its adapter elsewhere.
    other = make_request("other", [2], [4])
    assert batch.prepare(SchedulerOutput([plain, other], [1, 1], released_ids=["adapted"])).token_lora is None
    adapted.lora_index = 1
    step = batch.prepare(SchedulerOutput([adapted, plain], [1, 1], released_ids=["other"]))
    assert step.token_lora is not None
    assert step.token_lora.tolist() == [NO_LORA, 1]
