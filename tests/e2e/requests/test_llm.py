"""The blocking facade, as a script would use it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from penstock.ops.local.stack import LocalStack
from penstock.producer import LLM, SamplingParams
from penstock.shared.errors import PromptTooLongError, UnknownModelError, ValidationError

from ...gate import Gate

pytestmark = pytest.mark.xdist_group("deployment")

GREEDY = SamplingParams(temperature=0.0, max_tokens=32)


def test_generate_returns_one_output_per_prompt_in_order(deployment: LocalStack) -> None:
    with LLM(deployment.url, model="demo") as llm:
        outputs = llm.generate(["spell 7:", "spell 12:", [1, 2, 3]], GREEDY)
        assert [output.text for output in outputs[:2]] == [" seven.", " twelve."]
        assert [output.prompt for output in outputs] == ["spell 7:", "spell 12:", [1, 2, 3]]
        (single,) = llm.generate("spell 40:", GREEDY)
        assert single.text == " forty."
        chat = llm.generate([{"role": "user", "content": "spell 7:"}], GREEDY)
        assert [output.text for output in chat] == [" seven."]
        each = llm.generate(["spell 7:"] * 2, [GREEDY, SamplingParams(temperature=0, max_tokens=1)])
        assert [len(output.outputs[0].token_ids) for output in each][1] == 1


def test_errors_keep_their_type(deployment: LocalStack) -> None:
    with LLM(deployment.url) as llm:
        with pytest.raises(PromptTooLongError):
            llm.generate(["spell 7:", "x" * 9000], GREEDY)
        with pytest.raises(ValidationError, match=r"as many as the prompts \(2\), got 1"):
            llm.generate(["a", "b"], [GREEDY])
        with pytest.raises(UnknownModelError):
            llm.generate("spell 7:", model="other")


def test_streams_in_several_threads_and_one_that_is_closed(deployment: LocalStack, gate: Gate) -> None:
    with LLM(deployment.url, model="demo") as llm:

        def text(number: int) -> str:
            return "".join(delta.text for delta in llm.stream(f"spell {number}:", GREEDY))

        with ThreadPoolExecutor(2) as threads:
            assert list(threads.map(text, [7, 12])) == [" seven.", " twelve."]
        endless = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
        gate.hold_at(199)
        stream = llm.stream("spell 7:", endless, request_id="closed-early")
        assert next(stream).index == 0
        stream.close()
        assert llm.call(llm.client.status("closed-early")).state == "cancelled"
        with pytest.raises(PromptTooLongError):
            next(llm.stream("x" * 9000, GREEDY))


def test_closing_twice_does_nothing(deployment: LocalStack) -> None:
    llm = LLM(deployment.url)
    llm.close()
    llm.close()
