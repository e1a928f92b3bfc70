"""The fields that the dump of a failed step has, and those that it leaves out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog

from penstock.shared.messages.requests import EngineCoreRequest
from penstock.shared.params.sampling import SamplingParams
from penstock.worker.engine.core.dump import StepDump
from penstock.worker.engine.core.engine_core import EngineCore
from penstock.worker.engine.scheduling.block_pool import BlockPool
from penstock.worker.engine.scheduling.scheduler import Scheduler
from penstock.worker.engine.scheduling.scheduler_output import SampledTokens, SchedulerOutput

# Numbers that nothing else in a dump is: they reveal the prompt, or quotes of it.
PROMPT, DELIVERED, STOP, BIASED = [977, 978, 979], 976, 975, 974
SECRETS = [*PROMPT, DELIVERED, STOP, BIASED, "my secret"]
PARAMS = SamplingParams(
    temperature=0.5, max_tokens=9, seed=11, stop=["my secret"], stop_token_ids=[STOP], logit_bias={BIASED: 1.0}
)


class Broken:
    """An executor that raises."""

    device_memory_bytes = 4321

    def execute(self, output: SchedulerOutput) -> SampledTokens:
        raise RuntimeError("boom")


Fail = Callable[..., dict[str, Any]]


@pytest.fixture
def fail() -> Fail:
    """Make a step fail and return the event that tells of it."""

    def fail(dump: StepDump, num_requests: int = 1) -> dict[str, Any]:
        scheduler = Scheduler(BlockPool(8, 4), max_num_seqs=2, max_num_batched_tokens=8, max_model_len=16)
        core = EngineCore(scheduler, Broken(), vocab_size=1000, eos_token_ids=[2], dump=dump)
        for index in range(num_requests):
            request = EngineCoreRequest(
                request_id=f"r{index}", prompt_token_ids=PROMPT, sampling_params=PARAMS, output_token_ids=[DELIVERED]
            )
            assert core.add_request(request) is None
        with structlog.testing.capture_logs() as events:
            core.step()
        (event,) = [event for event in events if event["event"] == "step_failed"]
        return dict(event)

    return fail


def test_the_dump_has_scheduler_batch_and_requests(fail: Fail) -> None:
    event = fail(StepDump(), num_requests=2)
    assert event["error"] == "RuntimeError: boom"
    assert isinstance(event["exc_info"], RuntimeError)
    assert event["batch"] == {"num_requests": 2, "num_tokens": 8, "released_ids": []}
    assert (event["scheduler"]["num_running_reqs"], event["scheduler"]["num_waiting_reqs"]) == (2, 0)
    assert (event["num_free_blocks"], event["num_blocks"], event["device_memory_bytes"]) == (6, 8, 4321)
    request = event["requests"][1]
    names = ("request_id", "status", "num_tokens", "num_prompt_tokens", "num_computed_tokens", "num_new_tokens")
    assert [request[name] for name in names] == ["r1", "running", 4, 3, 0, 4]
    assert len(request["block_table"]) == 1
    params = request["sampling_params"]
    assert (params["temperature"], params["max_tokens"], params["seed"]) == (0.5, 9, 11)
    assert {"stop", "stop_token_ids", "logit_bias"} <= set(params["omitted"])


def test_the_dump_has_no_prompt_by_default(fail: Fail, tmp_path: Path) -> None:
    event = fail(StepDump(str(tmp_path)))
    text = Path(event["file"]).read_text()
    for secret in SECRETS:
        assert str(secret) not in repr({name: value for name, value in event.items() if name != "file"})
        assert str(secret) not in json.dumps({**json.loads(text), "trace": ""})
    event_with_prompts = fail(StepDump(shows_prompts=True))
    assert event_with_prompts["requests"][0]["prompt_token_ids"] == PROMPT
    assert event_with_prompts["requests"][0]["output_token_ids"] == [DELIVERED]
    assert event_with_prompts["file"] is None


def test_each_failure_gets_a_file_with_its_traceback(fail: Fail, tmp_path: Path) -> None:
    dump = StepDump(str(tmp_path / "dumps"))
    events = [fail(dump) for _ in range(2)]
    assert len({event["file"] for event in events}) == 2
    content = json.loads(Path(events[0]["file"]).read_text())
    assert content["requests"] == events[0]["requests"]
    assert 'raise RuntimeError("boom")' in content["trace"]


def test_a_folder_that_cannot_be_written_to_changes_nothing(fail: Fail, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert fail(StepDump(str(tmp_path / "file" / "dumps")))["file"] is None
