"""Steps on their way to other ranks arrive unchanged, and of block tables only changes travel."""

from __future__ import annotations

import dataclasses
import socket
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from penstock.kernels.paged_attention import PagedBatch
from penstock.worker.engine.ranks.messages import Allocate, RankChannel, RankCommand, RunStep, StopRank, encode
from penstock.worker.engine.ranks.step_codec import StepReceiver, StepSender
from penstock.worker.models.attention.page_layout import PageLayout
from penstock.worker.models.forward import ModelInput, VisionInputs
from penstock.worker.models.placing.device import host_array, to_device

CPU = torch.device("cpu")


def step(slots: list[int], table: list[list[int]], **others: Any) -> ModelInput:
    """A decode of the requests in these rows, whose tables are those."""
    count = len(slots)
    numbers = torch.arange(count)
    batch = PagedBatch(torch.tensor(table), numbers * 3, [1] * count, [5 + row for row in range(count)], 4)
    return ModelInput(numbers + 7, numbers + 4, numbers, batch, np.array(slots), **others)


def arrive(sender: StepSender, receiver: StepReceiver, original: ModelInput) -> tuple[RunStep, ModelInput]:
    message = sender.message_of(original)
    return message, receiver.step_of(msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=RunStep))


def check_same(original: ModelInput, received: ModelInput) -> None:
    for name in ("token_ids", "positions", "logit_rows", "inputs_embeds", "token_lora", "token_types"):
        expected, actual = getattr(original, name), getattr(received, name)
        assert (actual is None) == (expected is None)
        if isinstance(expected, Tensor):
            assert actual.dtype == expected.dtype
            assert torch.equal(actual, expected)
    assert received.state_slots.tolist() == original.state_slots.tolist()
    assert torch.equal(received.batch.block_table, original.batch.block_table)
    assert torch.equal(received.batch.slot_mapping, original.batch.slot_mapping)
    ends, actual = original.batch.visible_ends, received.batch.visible_ends
    assert actual is None if ends is None else actual is not None and torch.equal(actual, ends)
    for name in ("query_lens", "seq_lens", "block_size"):
        assert getattr(received.batch, name) == getattr(original.batch, name)


@given(st.data())
def test_every_step_survives_a_round_trip(data: st.DataObject) -> None:
    sender, receiver = StepSender(), StepReceiver(CPU)
    for _ in range(data.draw(st.integers(1, 5))):
        slots = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=6))
        width = data.draw(st.integers(1, 40))
        rows = {slot: data.draw(st.lists(st.integers(0, 9), min_size=width, max_size=width)) for slot in slots}
        original = step(slots, [rows[slot] for slot in slots])
        check_same(original, arrive(sender, receiver, original)[1])


def test_inputs_other_than_tokens_arrive() -> None:
    given_beside = {
        "inputs_embeds": torch.randn(2, 8).to(torch.bfloat16),
        "token_lora": torch.tensor([1, -1]),
        "token_types": torch.tensor([0, 1]),
    }
    original = step([3, 1], [[1], [2]], **given_beside)
    original.batch.visible_ends = torch.tensor([5, 9])
    check_same(original, arrive(StepSender(), StepReceiver(CPU), original)[1])


@pytest.mark.parametrize(
    "vision_inputs",
    [
        VisionInputs(torch.arange(6).view(3, 2)),
        VisionInputs(None, torch.tensor([1]), (torch.randn(1, 8).to(torch.bfloat16),)),
        VisionInputs(torch.arange(6).view(3, 2), torch.tensor([0, 1]), (torch.randn(2, 8), torch.randn(2, 8))),
    ],
    ids=["positions in three axes", "features for a deeper layer", "both"],
)
def test_inputs_of_images_arrive(vision_inputs: VisionInputs) -> None:
    original = step([3, 1], [[1], [2]], vision_inputs=vision_inputs)
    received = arrive(StepSender(), StepReceiver(CPU), original)[1].vision_inputs
    assert received is not None
    for expected, actual in ((vision_inputs.axes, received.axes), (vision_inputs.places, received.places)):
        assert actual is None if expected is None else actual is not None and torch.equal(actual, expected)
    assert [level.dtype for level in received.deeper] == [level.dtype for level in vision_inputs.deeper]
    assert all(map(torch.equal, received.deeper, vision_inputs.deeper))


def test_only_changes_of_block_tables_travel() -> None:
    sender, receiver = StepSender(), StepReceiver(CPU)
    table = np.arange(1, 1 + 64 * 512).reshape(64, 512)
    slots = list(range(64))
    first, _ = arrive(sender, receiver, step(slots, table.tolist()))
    assert len(first.changed_blocks) == table.nbytes
    again, _ = arrive(sender, receiver, step(slots, table.tolist()))
    assert again.changed_blocks == b""
    table[5, 511] += 1
    original = step(slots, table.tolist())
    changed, received = arrive(sender, receiver, original)
    assert len(changed.changed_blocks) == 8
    check_same(original, received)


def in_groups(slots: list[int], tables: list[list[list[int]]]) -> ModelInput:
    """A decode of requests that have a table for each group."""
    original, of_groups = step(slots, tables[0]), torch.tensor(tables)
    slots_of_groups = torch.arange(len(tables))[:, None] * 100 + original.batch.slot_mapping
    batch = PagedBatch(
        of_groups[0],
        slots_of_groups[0],
        original.batch.query_lens,
        original.batch.seq_lens,
        4,
        group_tables=of_groups,
        group_slots=slots_of_groups,
    )
    return dataclasses.replace(original, batch=batch)


def test_all_tables_arrive_first_and_then_their_changes() -> None:
    sender, receiver = StepSender(), StepReceiver(CPU)
    tables = [[[1, 2, 3], [4, 5, 6]], [[7, 8, 9], [10, 11, 12]], [[13, 14, 15], [16, 17, 18]]]
    for changed, num_bytes in (((0, 0, 0), 8 * 18), ((2, 1, 1), 8), ((1, 0, 2), 8)):
        group, row, column = changed
        tables[group][row][column] += 50
        original = in_groups([9, 2], tables)
        message, received = arrive(sender, receiver, original)
        assert len(message.changed_blocks) == num_bytes
        check_same(original, received)
        for name in ("group_tables", "group_slots"):
            assert torch.equal(getattr(received.batch, name), getattr(original.batch, name))
    pages = PageLayout((None, 8), 2, (0, 1, 1), (0, 0, 1))
    sent_on = Allocate(4, 16, 2, pages=pages)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sent_on), type=Allocate) == sent_on
    one = step([9], [[3]])
    check_same(one, arrive(StepSender(), StepReceiver(CPU), one)[1])


def test_messages_arrive_whole_and_in_order_and_the_end_is_detected() -> None:
    ours, theirs = socket.socketpair()
    near, far = RankChannel(ours, RankCommand), RankChannel(theirs, RankCommand)
    assert far.receive(0.0) is None
    large = Allocate(1, 2, 3), StepSender().message_of(step([0], [[9]])), StopRank()
    near.send_bytes(b"".join(map(encode, large)))
    assert [far.receive() for _ in large] == list(large)
    near.close()
    with pytest.raises(EOFError):
        far.receive()
    far.close()


def test_the_numbers_of_a_copy_are_those_of_the_host() -> None:
    """On another device they equal their source: reading them back would wait for it."""
    meta = torch.device("meta")
    array = np.arange(4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "pin_memory", lambda self: self)
        copy = to_device(array, meta)
    assert copy.device == meta
    assert host_array(copy) is array
    assert host_array(torch.tensor([3, 4])).tolist() == [3, 4]
