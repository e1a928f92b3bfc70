"""Attributes of a request's spans fit into them."""

from __future__ import annotations

from opentelemetry.proto.common.v1.common_pb2 import AnyValue

from penstock.shared.messages.outcome import Usage
from penstock.shared.params.sampling import MAX_SEED, SamplingParams
from penstock.shared.stats import RequestStats
from penstock.shared.tracing.attributes import of_params, of_stats, of_usage


def test_all_of_it_can_be_sent() -> None:
    params = SamplingParams(
        seed=MAX_SEED, max_tokens=2**31 - 1, top_k=2**31 - 1, temperature=0, presence_penalty=-2, stop=["a secret"]
    )
    attributes = of_params(params) | of_usage(Usage(2**40, 1, 1)) | of_stats(RequestStats())
    for value in attributes.values():
        if isinstance(value, int):  # more than 64 bits would cost all spans that are sent with it
            assert AnyValue(int_value=value).int_value == value
    assert "secret" not in repr(attributes)


def test_disabled_or_unset_parameters_are_no_attributes() -> None:
    assert of_params(SamplingParams(seed=5, max_tokens=None, temperature=0.5, top_p=0.9)) == {
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.seed": 5,
    }
