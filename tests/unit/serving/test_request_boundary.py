"""Whatever a template, a tokenizer or a parser raises ends one request with an error, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from penstock.producer.io_processors import IOProcessors
from penstock.producer.openai.answers.form import AnswerForm
from penstock.producer.openai.errors import error_of
from penstock.producer.openai.tools.formats import find_tool_call_style
from penstock.producer.openai.tools.parser import ToolCallParser
from penstock.shared import errors
from penstock.shared.broker import Claim
from penstock.shared.messages.core import EngineCoreOutput, Ready
from penstock.shared.messages.outcome import FinishReason, TokenLogprobs
from penstock.shared.messages.requests import EngineCoreRequest
from penstock.shared.params.pooling import PoolingParams, PoolingSetup
from penstock.shared.params.sampling import SamplingParams
from penstock.worker.serving.requests.generation import Generation
from penstock.worker.serving.requests.intake import Intake
from penstock.worker.serving.requests.segments import Segment
from penstock.worker.text.chat_template import ChatTemplate
from penstock.worker.text.thread import LONG_TEXT_CHARS
from penstock.worker.text.tokenizer import TextCodec

from ...every_exception import EVERY_EXCEPTION, Panic, name_of, raising
from ...io_processors import Nearest

READY = Ready(
    model_folder="/m",
    architecture="A",
    max_model_len=100_000,
    num_blocks=9,
    block_size=16,
    dtype="float32",
    device="cpu",
    vocab_size=30,
    eos_token_ids=[2],
    supported_tasks=("generate", "embed"),
    pooling=PoolingSetup(),
)
CHAT = [{"role": "user", "content": "w1"}]
LONG_TEXT = "w1 " * LONG_TEXT_CHARS

every_exception = pytest.mark.parametrize("kind", EVERY_EXCEPTION, ids=name_of)
# jinja2 takes a function that raises it for an undefined value.
every_exception_of_a_template = pytest.mark.parametrize(
    "kind", [kind for kind in EVERY_EXCEPTION if kind is not StopIteration], ids=name_of
)


def make_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({f"w{number}": number for number in range(30)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


class FailingTokenizer:
    """A tokenizer some methods of which raise."""

    def __init__(self, kind: type[BaseException], methods: Sequence[str]) -> None:
        self._tokenizer = make_tokenizer()
        for method in methods:
            setattr(self, method, raising(kind))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def failing_codec(kind: type[BaseException], *methods: str) -> TextCodec:
    """Return a codec whose tokenizer raises in these methods, by default in those that encode."""
    tokenizer = FailingTokenizer(kind, methods or ("encode_batch", "encode_batch_fast"))
    return TextCodec(cast(Tokenizer, tokenizer), ChatTemplate("{{ messages[0].content }}", {}))


async def prepare(intake: Intake, **fields: Any) -> EngineCoreRequest:
    if "pooling_params" not in fields:
        fields.setdefault("sampling_params", SamplingParams())
    payload = msgspec.msgpack.encode(EngineCoreRequest(request_id="r", **fields))
    return await intake.prepare(Claim("r", payload, epoch=1, num_logged_tokens=0, attempt=1))


@every_exception_of_a_template
def test_a_template_that_fails_on_a_chat_is_the_callers_error(kind: type[BaseException]) -> None:
    template = ChatTemplate("{% if explode is defined %}{{ explode() }}{% endif %}{{ messages[0].content }}", {})
    with pytest.raises(errors.ValidationError, match=r"^messages: the chat template refuses them"):
        template.render(CHAT, {"explode": raising(kind)})
    assert template.render(CHAT, {}) == "w1"


@every_exception_of_a_template
def test_a_template_that_fails_on_every_chat_is_the_models_failure(
    kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.worker.text.chat_template._strftime_now", raising(kind))
    template = ChatTemplate("{{ strftime_now('%Y') }}", {})
    TextCodec(make_tokenizer(), template)  # a worker starts with it: completions can be served
    with pytest.raises(errors.PenstockError, match="chat template") as caught:
        template.render(CHAT, {})
    assert error_of(caught.value).status == 500
    assert caught.value.code == "chat_template_failed"


def test_tools_that_are_nested_too_deep_are_the_callers_error() -> None:
    """Qwen2.5's template writes each tool as JSON."""
    template = ChatTemplate("{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}", {})
    nested: list[Any] = []
    for _ in range(10_000):
        nested = [nested]
    with pytest.raises(errors.ValidationError, match="the tools or chat_template_kwargs: RecursionError"):
        template.render(CHAT, {"tools": nested})


@pytest.mark.parametrize("name", ["self", "context", "messages", "args", "kwargs"])
def test_a_name_for_the_template_may_be_any(name: str) -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})
    assert template.render(CHAT, {name: 1}) == "w1"


@every_exception
@pytest.mark.parametrize("prompt", ["w1", LONG_TEXT], ids=["on-the-loop", "in-the-thread"])
async def test_a_tokenizer_that_fails_ends_the_request(kind: type[BaseException], prompt: str) -> None:
    intake = Intake(failing_codec(kind), READY)
    with pytest.raises(
        errors.RequestFailedError, match=rf"the tokenizer of the model failed: {kind.__name__}"
    ) as caught:
        await prepare(intake, prompt=prompt)
    assert caught.value.code == "tokenizer_failed"
    assert error_of(caught.value).status == 500


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": CHAT},
        {"messages": [{"role": "user", "content": LONG_TEXT}]},
        {"prompt": LONG_TEXT, "sampling_params": SamplingParams(truncate_prompt_tokens=5)},
        {"prompt_token_ids": [1], "sampling_params": SamplingParams(bad_words=["w2"])},
        {"prompt_token_ids": [1], "prediction": LONG_TEXT},
        {"prompt": "w1", "text_pair": "w2", "pooling_params": PoolingParams()},
    ],
    ids=["chat", "long-chat", "cut", "bad-words", "prediction", "pair"],
)
async def test_a_tokenizer_may_fail_on_any_text_of_a_request(fields: dict[str, Any]) -> None:
    intake = Intake(failing_codec(Panic), READY)
    with pytest.raises(errors.RequestFailedError, match="the tokenizer of the model failed: Panic"):
        await prepare(intake, **fields)


async def test_a_character_without_unknown_token_ends_the_request() -> None:
    tokenizer = Tokenizer(models.WordLevel({"w1": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    intake = Intake(TextCodec(tokenizer, None), READY)
    with pytest.raises(errors.RequestFailedError, match=r"the tokenizer of the model failed: .*UNK"):
        await prepare(intake, prompt="é")
    assert (await prepare(intake, prompt="w1")).prompt_token_ids == [1]


def generation_of(codec: TextCodec, params: SamplingParams, logged: list[Any] | None = None) -> Generation:
    request = EngineCoreRequest(request_id="r", prompt_token_ids=[1], sampling_params=params, epoch=1)
    claim = Claim("r", b"", epoch=1, num_logged_tokens=0, attempt=1)
    return Generation(Segment(request, logged or []), codec, claim)


def fails_in_text(generation: Generation, kind: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation._detokenizer, "add", raising(kind))


def fails_at_the_end(generation: Generation, kind: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation._detokenizer, "flush", raising(kind))


@every_exception
@pytest.mark.parametrize("stop", [None, ["w9"]])
def test_tokens_that_cannot_be_read_end_the_request(
    kind: type[BaseException], stop: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    generation = generation_of(TextCodec(make_tokenizer(), None), SamplingParams(max_tokens=9, stop=stop))
    generation.absorb(EngineCoreOutput("r", [1]))
    fails_in_text(generation, kind, monkeypatch)
    generation.absorb(EngineCoreOutput("r", [2]))
    gathered = generation.pop_delta()
    last, stop_core = generation.absorb(EngineCoreOutput("r", [3]))
    deltas = [delta for delta in (gathered, last) if delta is not None]
    assert generation.finished
    assert stop_core
    assert deltas[-1].finish_reason == FinishReason.ERROR
    assert deltas[-1].error is not None
    assert deltas[-1].error.code == "tokenizer_failed"
    assert kind.__name__ in deltas[-1].error.message
    assert deltas[-1].usage is not None


@every_exception
@pytest.mark.parametrize("fail", [fails_in_text, fails_at_the_end])
def test_an_end_that_cannot_be_read_is_an_error(
    kind: type[BaseException], fail: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    generation = generation_of(TextCodec(make_tokenizer(), None), SamplingParams(max_tokens=1))
    fail(generation, kind, monkeypatch)
    last, stop_core = generation.absorb(EngineCoreOutput("r", [1], FinishReason.LENGTH))
    assert last is not None
    assert (last.finish_reason, last.token_ids, stop_core) == (FinishReason.ERROR, [1], False)


@every_exception
def test_an_end_of_a_prompt_that_cannot_be_read_ends_the_request(kind: type[BaseException]) -> None:
    codec = failing_codec(kind, "id_to_token")
    with pytest.raises(errors.RequestFailedError, match="the tokenizer of the model failed"):
        generation_of(codec, SamplingParams())


@every_exception
def test_a_deadline_ends_a_request_with_unreadable_text(
    kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    generation = generation_of(TextCodec(make_tokenizer(), None), SamplingParams(max_tokens=9))
    fails_at_the_end(generation, kind, monkeypatch)
    assert generation.cut_off(FinishReason.EXPIRED).finish_reason == FinishReason.EXPIRED


@every_exception
def test_log_probabilities_without_text_end_the_request(
    kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    codec = TextCodec(make_tokenizer(), None)
    generation = generation_of(codec, SamplingParams(max_tokens=9, logprobs=0))
    monkeypatch.setattr(codec.token_bytes, "_bytes_of", raising(kind))
    output = EngineCoreOutput("r", [2], new_logprobs=[TokenLogprobs(2, -1.0, 1, [])])
    last, stop_core = generation.absorb(output)
    assert last is not None
    assert (last.finish_reason, stop_core) == (FinishReason.ERROR, True)


@every_exception
async def test_an_io_processor_that_fails_ends_the_request(kind: type[BaseException]) -> None:
    class Failing(Nearest):
        def parse_request(self, data: Any) -> Any:
            return raising(kind)() if data == "parse" else data

        async def pre_process(  # pyright: ignore[reportIncompatibleMethodOverride]  # both forms are allowed
            self, prompt: Any, request_id: str | None = None
        ) -> Any:
            return raising(kind)() if prompt == "pre" else ["w1"]

        def output_to_response(self, output: Any) -> Any:
            return raising(kind)()

    processor = IOProcessors([Failing()]).find(None)
    for data in ("parse", "pre"):
        with pytest.raises(errors.PenstockError) as caught:
            await processor.prompts(data, "id")
        assert error_of(caught.value).status in (400, 500)
    with pytest.raises(errors.RequestFailedError):
        processor.response({})
    assert await processor.prompts("fine", "id") == ["w1"]


@every_exception
def test_a_parser_of_answers_that_fails_ends_the_request(
    kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    form = AnswerForm(
        functions=[],
        grammar=None,
        grammar_fields={},
        call_format=find_tool_call_style("hermes").call_format,
        has_channels=False,
        is_single=False,
        reasoning=None,
        may_begin_inside=False,
        is_inside=False,
        includes_reasoning=True,
    )
    monkeypatch.setattr(ToolCallParser, "feed", raising(kind))
    parser = form.make_parser()
    for parse in (lambda: parser.feed("text"), parser.finish):
        with pytest.raises(errors.RequestFailedError, match="parser of reasoning and tool calls failed") as caught:
            parse()
        assert error_of(caught.value).status == 500
