"""Control calls check themselves, where they are made and where they are decoded."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from penstock.shared.control.calls import ControlCommand, ControlReply, Utility, UtilityAnswer
from penstock.shared.control.engine import SLEEP_TAGS, CollectiveRpc, Sleep, WakeUp
from penstock.shared.control.model import ReloadWeights, SaveShardedState
from penstock.shared.errors import ValidationError
from penstock.shared.messages.supervision import CancelCommand
from penstock.worker.serving.calls.call_handler import UndecodableCall, decode_command


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Sleep(level=0), "level must be 1 or 2, got 0"),
        (lambda: Sleep(level=True), "level must be 1 or 2"),
        (lambda: Sleep(mode="drop"), "mode must be one of keep, wait, abort, got 'drop'"),
        (lambda: Sleep(mode="wait", drain_timeout_s=float("nan")), "drain_timeout_s must be a number of seconds"),
        (lambda: WakeUp(["weights", "cache"]), "tags must be some of weights, kv_cache"),
        (lambda: WakeUp([]), "tags must be some of"),
        (lambda: SaveShardedState("weights"), "path must be absolute"),
        (lambda: SaveShardedState("/a", "one.safetensors"), "pattern must name a file with {part}"),
        (lambda: SaveShardedState("/a", "{part}/x.safetensors"), "pattern must"),
        (lambda: SaveShardedState("/a", "{part}.bin"), "pattern must"),
        (lambda: SaveShardedState("/a", "{who}-{part}.safetensors"), "pattern must"),
        (lambda: SaveShardedState("/a", "{part.safetensors"), "pattern must"),
        (lambda: SaveShardedState("/a", None, 0), "max_size must be a positive number of bytes"),
        (lambda: ReloadWeights(path="weights"), "path must be absolute"),
        (lambda: ReloadWeights(mode="drop"), "mode must be one of wait, keep, abort, got 'drop'"),
        (lambda: ReloadWeights(version="v" * 129), "version must be at most 128 printable characters"),
        (lambda: ReloadWeights(version="a\nb"), "version must be at most 128 printable characters"),
        (lambda: ReloadWeights(drain_timeout_s=0.0), "drain_timeout_s must be a number of seconds"),
        (lambda: CollectiveRpc(""), "method must be the name"),
        (lambda: CollectiveRpc("a", -1.0), "timeout_s must be"),
    ],
)
def test_a_wrong_call_cannot_be_created(make: Any, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        make()


def test_names_of_shards() -> None:
    assert SaveShardedState("/a").shard_name(3) == "model-rank-0-part-3.safetensors"
    assert SaveShardedState("/a", "w{part:03}.safetensors").shard_name(3) == "w003.safetensors"


@pytest.mark.parametrize("union", [Utility, UtilityAnswer])
def test_no_two_kinds_share_a_tag(union: Any) -> None:
    tags = [kind.__struct_config__.tag for kind in union.__args__]
    assert len(set(tags)) == len(tags) > 5


def test_every_call_survives_a_round_trip() -> None:
    calls = [Sleep(level=2, mode="wait", drain_timeout_s=5), WakeUp(list(SLEEP_TAGS)), WakeUp()]
    calls += [SaveShardedState("/a", max_size=7), CollectiveRpc("m", 1.5, [1, "a", None], {"x": [2.5, b"y"]})]
    for call in calls:
        command = ControlCommand(call_id="c", call=call, expires_at_ms=9)
        assert decode_command(msgspec.msgpack.encode(command)) == command


def test_fields_of_later_versions_are_skipped() -> None:
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(ControlReply(call_id="c", engine_id="e")))
    longer = msgspec.msgpack.encode([*fields, None, None, "new"][:6])
    assert msgspec.msgpack.decode(longer, type=ControlReply).engine_id == "e"


@pytest.mark.parametrize(
    ("call", "reason"), [(["nap", 1], "Invalid value 'nap'"), (["sleep", 3], "level must be 1 or 2, got 3"), (7, "")]
)
def test_an_undecodable_call_still_has_its_id(call: Any, reason: str) -> None:
    command = decode_command(msgspec.msgpack.encode(["control", 2, "c7", call, 9]))
    assert isinstance(command, UndecodableCall)
    assert command.call_id == "c7"
    assert reason in command.reason


def test_cancellations_use_the_same_channel() -> None:
    assert decode_command(msgspec.msgpack.encode(CancelCommand("r"))) == CancelCommand("r")
    with pytest.raises(msgspec.ValidationError):
        decode_command(msgspec.msgpack.encode(["other", 1]))
