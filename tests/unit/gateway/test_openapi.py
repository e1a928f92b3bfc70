"""The OpenAPI document and the settings of the gateway."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from penstock.producer.control.secret_keys import matches
from penstock.producer.gateway.app import OPERATIONS
from penstock.producer.gateway.auth import ApiKey
from penstock.producer.gateway.operations import build_openapi
from penstock.producer.gateway.settings import GatewaySettings
from penstock.shared.errors import PenstockError


def test_the_document_has_every_operation_and_no_loose_end() -> None:
    document = build_openapi(OPERATIONS, "1.2.3")
    text = msgspec.json.encode(document).decode()
    described = {(path, method) for path, methods in document["paths"].items() for method in methods}
    assert len(described) == len(OPERATIONS)
    assert ("/v1/models/{model}", "get") in described
    names = {part.partition('"')[0] for part in text.split('"#/components/schemas/')[1:]}
    assert names <= document["components"]["schemas"].keys()
    chat = document["paths"]["/v1/chat/completions"]["post"]
    assert chat["responses"].keys() >= {"200", "400", "401", "404", "413", "429", "499", "503"}
    assert chat["responses"]["200"]["content"].keys() == {"application/json", "text/event-stream"}
    assert document["paths"]["/health"]["get"]["security"] == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_body_bytes", 10),
        ("max_running_requests", 0),
        ("keep_alive_s", 0),
        ("keep_alive_timeout_s", 0),
        ("request_timeout_s", -1),
        ("lease_ttl_s", float("inf")),
        ("reconnect_grace_s", -1),
        ("cors_origins", ("example.org",)),
        ("tenant", "a{b"),
    ],
)
def test_a_wrong_setting_is_named(field: str, value: Any) -> None:
    with pytest.raises(PenstockError, match=field):
        GatewaySettings(redis_url="redis://localhost", **{field: value})


def test_a_record_of_version_1_still_decodes() -> None:
    data = b"""{"key_id": "00112233aabb", "digest": "LPJNul+wow4m6DsqxbninhsWHlwfp0JecwQzYpOLmCQ=", "tenant": "acme"}"""
    record = msgspec.json.decode(data, type=ApiKey)
    assert (record.tenant, record.band, record.version) == ("acme", "", 1)
    assert matches("hello", record.digest)
    assert not matches("hellO", record.digest)
