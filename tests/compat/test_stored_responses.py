"""Records of responses as version 1 wrote them still decode, and ask for the same.

``response_v1.json`` is never changed; a response that breaks here is lost to whoever polls it, with its conversation.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from penstock.producer.openai.responses.prepared import new_response, prepare_response
from penstock.producer.openai.responses.response_store import StoredResponse

RECORDED = (Path(__file__).parent / "response_v1.json").read_bytes()


def test_a_record_of_version_1_asks_for_the_same() -> None:
    record = msgspec.json.decode(RECORDED, type=StoredResponse)
    assert StoredResponse.__struct_fields__[0] == "version"
    chat = prepare_response(record).chat
    messages: Any = chat.prompt
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool", "user"]
    assert messages[2]["reasoning_content"] == "hm"
    assert messages[2]["tool_calls"][0]["id"] == "call_1"
    params = chat.params
    assert (params.max_tokens, params.temperature, params.top_p, params.seed, params.logprobs) == (9, 0.5, 0.9, 7, 2)
    assert chat.style.call_id("r", 0, 0)
    response = msgspec.to_builtins(new_response(record))
    names = ("id", "created_at", "status", "background", "metadata", "instructions", "previous_response_id")
    assert [response[name] for name in names] == [
        "resp_00112233445566778899aabbccddeeff",
        1795329488,
        "queued",
        True,
        {"k": "v"},
        "be brief",
        "resp_ffeeddccbbaa99887766554433221100",
    ]
    assert response["tools"][0]["name"] == "weather"
