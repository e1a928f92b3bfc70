"""Requests to a model that pools, and the path of its results."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.shared.errors import UnsupportedParameterError, UnsupportedTaskError, ValidationError
from penstock.shared.params.pooling import Pooled, PoolingParams


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        (
            {"task": "sing"},
            ValidationError,
            "task must be one of embed, classify, token_embed, token_classify, got",
        ),
        ({"task": "score"}, UnsupportedTaskError, "task 'score' is not served: vLLM has removed it"),
        ({"task": "plugin"}, UnsupportedTaskError, "it goes with data, for an I/O processor"),
        ({"dimensions": 0}, ValidationError, r"dimensions must be in \[1, "),
        ({"dimensions": True}, ValidationError, "dimensions must be an integer"),
        ({"use_activation": 1}, ValidationError, "use_activation must be True, False or None, got 1"),
        ({"prompt_name": ""}, ValidationError, "prompt_name must be a string of 1 to 256 characters"),
        ({"step_tag_id": 3}, UnsupportedParameterError, "step_tag_id is not supported"),
    ],
)
def test_impossible_parameters_give_a_reason(fields: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        PoolingParams(**fields)


def test_a_result_survives_a_round_trip() -> None:
    assert Pooled(data=b"\x00\x00\x80?\x00\x00\x00\xc0", shape=(2,)).floats().tolist() == [1.0, -2.0]


@pytest.mark.parametrize(
    ("changed", "message"),
    [({"dtype": "float16"}, "this version reads float32"), ({"shape": (2, 2)}, r"has 8 bytes, .* shape \[2, 2\]")],
)
def test_a_result_of_another_form_is_no_garbage(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Pooled(**{"data": bytes(8), "shape": (2,), **changed}).floats()
