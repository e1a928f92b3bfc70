"""Bytes written by earlier versions still decode to the same values.

``wire_v1.json`` holds, per message, the msgpack bytes (hex) as version 1 wrote them and the expected value. Fields may
be appended with a default; a change that breaks one of these breaks requests that wait in a user's Redis.
To add messages (never to change old ones): ``python tests/compat/record.py``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from penstock.producer.control.secret_keys import OperatorKey, Role
from penstock.producer.webhooks.events import WebhookEvent, WebhookSecret, WebhookTarget
from penstock.shared.control.calls import ControlCommand, ControlReply, Utility, UtilityAnswer
from penstock.shared.deployment import records
from penstock.shared.deployment.audit import AuditEntry
from penstock.shared.messages.core import CoreInput, CoreOutput, WaveStarted
from penstock.shared.messages.deltas import Delta
from penstock.shared.messages.devices import DeviceRecord, ModelPhase
from penstock.shared.messages.requests import EngineCoreRequest, InputChunk
from penstock.shared.messages.supervision import EngineCommand, EngineState, WorkerCommand
from penstock.shared.metrics import engines_samples
from penstock.shared.metrics.exposition import expose
from penstock.shared.queue.lifecycle import EventKind, RequestEvent, decode_event
from penstock.shared.stats import Histogram
from penstock.worker.fleet.backend import AgentSpec, AgentStatus

RECORDED: list[dict[str, Any]] = json.loads((Path(__file__).parent / "wire_v1.json").read_text())
TYPES: dict[str, Any] = {
    "EngineCoreRequest": EngineCoreRequest,
    "CoreInput": CoreInput,
    "InputChunk": InputChunk,
    "CoreOutput": CoreOutput,
    "Delta": Delta,
    "EngineCommand": EngineCommand,
    "WorkerCommand": WorkerCommand,
    "ControlReply": ControlReply,
    "WebhookTarget": WebhookTarget,
    "WebhookSecret": WebhookSecret,
    "WebhookEvent": WebhookEvent,
    "AgentSpec": AgentSpec,
    "AgentStatus": AgentStatus,
    "WaveStarted": WaveStarted,
}


@pytest.mark.parametrize("entry", RECORDED, ids=[entry["name"] for entry in RECORDED])
def test_bytes_of_version_1_still_decode(entry: dict[str, Any]) -> None:
    message = msgspec.msgpack.decode(bytes.fromhex(entry["hex"]), type=TYPES[entry["decode_as"]])
    assert type(message).__name__ == entry["type"]
    types = {field.name: field.type for field in msgspec.structs.fields(message)}
    for field, value in entry["fields"].items():
        # Through the type: a struct inside may have got fields since.
        assert getattr(message, field) == msgspec.convert(value, types[field], str_keys=True), field


def test_fields_of_a_later_version_are_skipped() -> None:
    later = msgspec.msgpack.decode(msgspec.msgpack.encode(Delta(index=3, token_ids=[1], text="x")))
    delta = msgspec.msgpack.decode(msgspec.msgpack.encode([*later, "new field", 7]), type=Delta)
    assert (delta.index, delta.token_ids, delta.text) == (3, [1], "x")


def test_a_card_of_an_earlier_worker_still_decodes() -> None:
    data = b'{"version":1,"model":"m","architecture":"LlamaForCausalLM","max_model_len":9,"vocab_size":5}'
    card = msgspec.json.decode(data, type=records.ModelCard)
    assert (card.model, card.max_model_len, card.eos_token_ids) == ("m", 9, [])
    assert (card.supported_tasks, card.is_tracing_enabled) == (("generate",), False)
    assert (card.system_anywhere, card.takes_developer) == (False, False)


def test_every_command_call_and_answer_is_recorded() -> None:
    """Commands and answers travel between releases: a client may be older or newer than the worker."""
    types = {entry["type"] for entry in RECORDED}
    for union in (EngineCommand, WorkerCommand):
        assert {kind.__name__ for kind in get_args(union)} - types == set()
    inside = {"ControlCommand": "call", "ControlReply": "answer"}
    messages = [entry["fields"][inside[entry["type"]]] for entry in RECORDED if entry["type"] in inside]
    tags = {value[0] for value in messages if value is not None}
    kinds = (*get_args(Utility), *get_args(UtilityAnswer))
    assert {kind.__struct_config__.tag for kind in kinds} - tags == set()


def test_every_wire_struct_is_a_versioned_or_enclosed_array() -> None:
    """Structs stored in Redis carry their version; those on the pipe of one release need not."""
    kinds = [
        EngineCoreRequest,
        Delta,
        records.ModelCard,
        records.EngineHeartbeat,
        DeviceRecord,
        InputChunk,
        WebhookTarget,
        WebhookSecret,
        WebhookEvent,
    ]
    for kind in (*kinds, ControlCommand, ControlReply):
        assert kind.__struct_fields__[0] == "version"


def test_a_device_record_of_another_version_is_read() -> None:
    """Read a record with a phase and fields that this version lacks."""
    data = (
        b'{"version":1,"device_id":"w/cpu","worker_id":"w","host":"h","device":"cpu","budget_bytes":100,"models":['
        b'{"name":"a","phase":"awake","level":0,"awake_bytes":60,"asleep_bytes":5,"new":1},'
        b'{"name":"b","phase":"asleep","level":1,"awake_bytes":60,"asleep_bytes":5},{"name":"c","phase":"elsewhere"}],'
        b'"last_swap":{"at":1795000000.5,"left":["b"],"entered":"a","reason":"some day","took_s":0.5},"new":[]}'
    )
    record = msgspec.json.decode(data, type=DeviceRecord)
    assert [model.device_bytes for model in record.models] == [60, 5, 0]
    assert [model.phase_words for model in record.models] == [ModelPhase.AWAKE, "asleep 1", "elsewhere"]
    assert record.last_swap is not None
    assert (record.last_swap.entered, record.last_swap.reason) == ("a", "some day")


def test_events_of_version_1_still_decode() -> None:
    event = decode_event(
        "1795000000123-4", b"1\nfinished\n200\nhost-1-0\n\nstop\n2\n100\n256\n12\n3400", request_id="r", tenant="t"
    )
    assert event == RequestEvent(
        event_id="1795000000123-4",
        at=1795000000.123,
        request_id="r",
        tenant="t",
        band="",
        kind=EventKind.FINISHED,
        num_output_tokens=200,
        engine_id="host-1-0",
        cause="stop",
        num_attempts=2,
        num_prompt_tokens=100,
        max_tokens=256,
        waited_s=0.012,
        took_s=3.4,
    )


def test_known_fields_of_later_events_are_read() -> None:
    lines = b"2\nclaimed\n3\nhost-1-0\n1795000000123456\n\n1\n\n\n\n\nsomething new"
    event = decode_event("1-0", lines, request_id="r")
    assert event is not None
    assert (event.kind, event.epoch, event.num_attempts) == (EventKind.CLAIMED, 1795000000123456, 1)
    assert decode_event("1-0", b"2\nteleported\n3", request_id="r") is None


def test_stored_records_of_operators_still_decode() -> None:
    entry = msgspec.json.decode(
        b'{"version":1,"at":1795000000.5,"actor":"olga","via":"cli","address":"host:7","action":"queue.pause",'
        b'"target":"m","details":{"running":"run on"},"result":"redis_full","something":"new"}',
        type=AuditEntry,
    )
    assert (entry.actor, entry.action, entry.details, entry.result) == (
        "olga",
        "queue.pause",
        {"running": "run on"},
        "redis_full",
    )
    key = msgspec.json.decode(
        b'{"version":1,"key_id":"k1","digest":"c2hh","name":"olga","role":"operator","sees_contents":true,'
        b'"created_at":1795000000.0}',
        type=OperatorKey,
    )
    assert (key.digest, key.role, key.sees_contents) == (b"sha", Role.OPERATOR, True)
    assert msgspec.json.decode(b'{"key_id":"k","digest":"","name":"n"}', type=OperatorKey).role is Role.VIEWER


def test_engines_have_no_state_that_older_clients_lack() -> None:
    """Check the states, because an older client cannot read a heartbeat with another one. A new state needs a field."""
    states = "starting compiling ready busy stalled draining sleeping dead stopped failed"
    assert [state.value for state in EngineState] == states.split()


def test_a_heartbeat_of_a_later_engine_is_read() -> None:
    """Read a heartbeat as a client without ``sleep_level`` does, and one with fields that this client lacks."""
    beat = records.EngineHeartbeat(
        worker_id="w",
        engine_id="w-0",
        model="m",
        state=EngineState.SLEEPING,
        host="h",
        worker_pid=1,
        core_pid=2,
        sleep_level=1,
    )
    earlier = msgspec.defstruct(
        "EarlierHeartbeat", [("engine_id", str), ("state", EngineState), ("core_pid", int)], omit_defaults=True
    )
    assert msgspec.json.decode(msgspec.json.encode(beat), type=earlier) == earlier("w-0", EngineState.SLEEPING, 2)
    later = msgspec.json.encode(msgspec.to_builtins(beat) | {"device_id": "gpu0", "lateness": 0.5})
    assert msgspec.json.decode(later, type=records.EngineHeartbeat) == beat


def test_a_heartbeat_of_an_earlier_engine_keeps_the_bounds_that_it_counted_by() -> None:
    data = (
        b'{"worker_id":"w","engine_id":"w-0","model":"m","state":"busy","host":"h","worker_pid":1,"core_pid":2,'
        b'"stats":{"num_finished":{"stop":1},"num_prompt_tokens":8,"num_output_tokens":2,'
        b'"time_to_first_token_s":{"bounds":[0.01,0.05],"counts":[1,0,0],"sum":0.003}}}'
    )
    beat = msgspec.json.decode(data, type=records.EngineHeartbeat)
    assert beat.stats is not None
    assert beat.stats.time_to_first_token_s == Histogram((0.01, 0.05), [1, 0, 0], 0.003)
    assert beat.stats.num_prompt_tokens_of.count == 0
    samples = {sample.spec.name: sample.value for sample in engines_samples([beat])}
    assert samples["generation_tokens"] == 2
    assert b'penstock_time_to_first_token_seconds_bucket{engine="w-0",le="0.05",model_name="m"} 1.0' in expose(
        engines_samples([beat])
    )
