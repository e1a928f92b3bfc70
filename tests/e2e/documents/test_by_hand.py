"""Scripts that drive an engine by hand: add requests, and step until nothing is unfinished."""

from __future__ import annotations

import itertools

import msgspec
import pytest
import redis
from redis.exceptions import NoPermissionError

from penstock.ops.local.stack import LocalStack
from penstock.producer import LLM, PoolingParams, RequestOutput, RequestOutputKind, SamplingParams
from penstock.shared import errors

from ...gate import Gate
from ..following import LONG, PROMPT

pytestmark = pytest.mark.xdist_group("deployment")

GREEDY = SamplingParams(temperature=0.0, max_tokens=32)
KINDS = {kind: msgspec.structs.replace(GREEDY, output_kind=kind) for kind in RequestOutputKind}


def stepped(llm: LLM, timeout_s: float | None = None) -> list[RequestOutput]:
    outputs = llm.step(timeout_s)
    return [output for output in outputs if isinstance(output, RequestOutput)]


def driven(llm: LLM) -> list[RequestOutput]:
    outputs: list[RequestOutput] = []
    while llm.has_unfinished_requests():
        came = stepped(llm)
        assert came, "a step waits for something"
        outputs += came
    return outputs


def test_every_output_is_delivered_once_in_the_requested_kind(deployment: LocalStack) -> None:
    with LLM(deployment.url, model="demo") as llm, LLM(deployment.url, model="demo") as other:
        assert not llm.has_unfinished_requests()
        assert llm.step() == []
        other.add_request("elsewhere", "spell 40:", KINDS[RequestOutputKind.FINAL_ONLY])
        for kind, params in KINDS.items():
            llm.add_request(f"hand-{kind.name}", "count from four to nine:", params)
        several = msgspec.structs.replace(KINDS[RequestOutputKind.FINAL_ONLY], n=2, temperature=1.0)
        llm.add_request("hand-several", "spell 7:", several)
        outputs = driven(llm)
        assert not llm.has_unfinished_requests()
        (elsewhere,) = driven(other)
        rest = " four five six seven eight nine."
        parts = [one.outputs[0].text for one in outputs if one.request_id == "hand-DELTA"]
        wholes = [one.outputs[0].text for one in outputs if one.request_id == "hand-CUMULATIVE"]
        finals = [one for one in outputs if one.request_id == "hand-FINAL_ONLY"]
        assert ("".join(parts), wholes[-1], [one.text for one in finals]) == (rest, rest, [rest])
        assert all(whole.startswith(before) for before, whole in itertools.pairwise(wholes))
        assert [len(one.outputs) for one in outputs if one.request_id == "hand-several"] == [2]
        assert elsewhere.text == " forty."
        # The script attaches to a known request: a script that is started again gets the existing output.
        other.add_request("hand-FINAL_ONLY", "count from four to nine:", KINDS[RequestOutputKind.FINAL_ONLY])
        assert [one.text for one in driven(other)] == [rest]


def test_an_aborted_request_has_no_more_output_and_the_others_continue(deployment: LocalStack, gate: Gate) -> None:
    with LLM(deployment.url, model="demo") as llm:
        gate.hold_at(2)
        llm.add_request("hand-long", PROMPT, LONG)
        llm.add_request("hand-short", "spell 7:", KINDS[RequestOutputKind.FINAL_ONLY])
        with pytest.raises(errors.ValidationError, match="'hand-long' was added already and is not finished"):
            llm.add_request("hand-long", PROMPT, LONG)
        outputs: list[RequestOutput] = []
        while sum(len(one.outputs[0].token_ids) for one in outputs) < 2:
            outputs += stepped(llm)  # the gate may release outputs one by one
        assert {one.request_id for one in outputs} == {"hand-long"}
        assert llm.step(timeout_s=0.0) == []
        llm.abort_request(["hand-long", "nobody's"])
        gate.open()
        assert [(one.request_id, one.text) for one in driven(llm)] == [("hand-short", " seven.")]
        assert llm.status("hand-long").state == "cancelled"


def test_failures_are_raised_by_step_and_refusals_by_the_call(deployment: LocalStack) -> None:
    with LLM(deployment.url, model="demo") as llm:
        with pytest.raises(errors.UnsupportedTaskError):
            llm.add_request("hand-pooled", "spell 7:", PoolingParams())
        assert not llm.has_unfinished_requests()
        llm.add_request("hand-too-long", "x" * 9000, GREEDY)
        with pytest.raises(errors.PromptTooLongError) as caught:
            driven(llm)
        assert caught.value.__notes__ == ["request hand-too-long"]
        llm.add_request("hand-after", "spell 7:", GREEDY)
        assert "".join(one.text for one in driven(llm)) == " seven."


def test_a_refusal_of_redis_is_raised_by_step(deployment: LocalStack) -> None:
    """Requests that are attached to read their logs, which this user may not."""
    with redis.Redis(unix_socket_path=deployment.url.removeprefix("unix://")) as server:
        server.execute_command("ACL", "SETUSER", "hand", "on", ">pw", "~*", "&*", "+@all")
        with LLM(deployment.url, model="demo") as llm:
            llm.add_request("hand-refused", "spell 7:", GREEDY)
            driven(llm)
        with LLM(deployment.url.replace("unix://", "unix://hand:pw@"), model="demo") as llm:
            server.execute_command("ACL", "SETUSER", "hand", "-lrange")
            llm.add_request("hand-refused", "spell 7:", GREEDY)
            with pytest.raises(NoPermissionError, match="lrange") as caught:
                driven(llm)
            assert caught.value.__notes__ == ["request hand-refused"]
            assert not llm.has_unfinished_requests()
        server.execute_command("ACL", "DELUSER", "hand")
