"""Settings of a jobs process, and jobs in plain data."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.producer.jobs import JobSettings, deserialize, serialize
from penstock.producer.jobs.generation import params_from
from penstock.shared.errors import ConfigurationError, QueueFullError, RequestFailedError, ValidationError
from penstock.shared.params.sampling import SamplingParams
from penstock.shared.params.structured import StructuredOutputsParams


@pytest.mark.parametrize(
    ("name", "value"), [("max_jobs", 1), ("poll_delay_s", 0), ("sweep_every_s", 7), ("lease_ttl_s", -1)]
)
def test_a_setting_that_makes_no_sense_is_named(name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=name):
        JobSettings(redis_url="redis://localhost", **{name: value})


def test_errors_keep_their_type() -> None:
    error = deserialize(serialize({"r": ValidationError("prompt must not be empty")}))["r"]
    assert isinstance(error, ValidationError)
    assert str(error) == "prompt must not be empty"
    error = deserialize(serialize({"r": QueueFullError("full", retry_after_s=1.0)}))["r"]
    assert isinstance(error, RequestFailedError)
    assert (error.code, error.retryable) == ("queue_full", True)
    assert str(deserialize(serialize({"r": asyncio.CancelledError()}))["r"]) == "the job was aborted"
    with pytest.raises(TypeError, match="plain data"):
        serialize({"a": (object(),)})


def test_parameters_are_read_from_plain_data() -> None:
    assert params_from(None) is None
    assert params_from({"max_tokens": 3, "structured_outputs": {"choice": ["a"]}}) == SamplingParams(
        max_tokens=3, structured_outputs=StructuredOutputsParams(choice=["a"])
    )
    with pytest.raises(ValidationError, match=r"params\.structured_outputs has no chioce"):
        params_from({"structured_outputs": {"chioce": ["a"]}})
    with pytest.raises(ValidationError, match="params must be a dict"):
        params_from([1])  # type: ignore[arg-type]  # what a caller may pass all the same
