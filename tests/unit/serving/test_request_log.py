"""The log of a request: ids, parameters and figures, and contents only on request."""

from __future__ import annotations

from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from penstock.shared.broker import Claim
from penstock.shared.messages.outcome import FinishReason
from penstock.shared.messages.requests import EngineCoreRequest
from penstock.shared.params.sampling import SamplingParams
from penstock.worker.serving.reporting.observers import RequestLog
from penstock.worker.serving.requests.generation import Generation
from penstock.worker.serving.requests.segments import Segment

PROMPT = [11, 12, 13]


@pytest.mark.parametrize("logs_prompts", [False, True])
def test_contents_are_logged_only_on_request(logs_prompts: bool) -> None:
    params = SamplingParams(temperature=0.5, max_tokens=3, seed=7, detokenize=False, bad_words=["secret"])
    request = EngineCoreRequest(request_id="r", prompt_token_ids=PROMPT, sampling_params=params, epoch=1)
    claim = Claim("r", b"", epoch=1, num_logged_tokens=0, attempt=1)
    generation = Generation(Segment(request, []), cast(Any, None), claim)
    request_log = RequestLog("m", logs_prompts=logs_prompts)
    with capture_logs() as logs:
        request_log.record_begin(generation, request)
        request_log.record_end(generation, generation.cut_off(FinishReason.EXPIRED))
    end = logs[-1]
    assert (end["event"], end["request_id"], end["finish_reason"]) == ("request_finished", "r", FinishReason.EXPIRED)
    assert end["params"] == {"temperature": 0.5, "max_tokens": 3, "seed": 7, "detokenize": False}
    assert "secret" not in str(logs)
    assert (str(PROMPT) in str(logs)) is logs_prompts
