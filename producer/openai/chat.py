"""POST /v1/chat/completions: the body, and how deltas become the response or the chunks of a stream."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET

from ...shared.messages.deltas import Delta
from ...shared.messages.outcome import FinishReason
from ..results import CompletionOutput, RequestOutput
from .answers.chat_objects import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    CustomCall,
    CustomCallDelta,
    FunctionCall,
    FunctionCallDelta,
    MessageDelta,
    ToolCall,
    ToolCallDelta,
)
from .answers.common import OpenAIFinishReason, Usage, UsageCounter, finish_reason_of, response_head, stop_reason_of
from .answers.form import AnswerForm, AnswerParser, answer_form
from .answers.logprobs import ChatLogprobs, chat_logprobs
from .answers.parts import CallDelta, MessageParts
from .errors import bad_field
from .generation_body import GenerationBody
from .messages import ChatMessage, template_messages
from .parsers import Parsers
from .prepared import Prepared
from .thinking import Effort, ReasoningOptions, Thinking, Verbosity, thinking_budget, thinking_kwargs
from .tools.custom_input import CustomInputReader, decoded_input
from .tools.definitions import unknown_function_keys
from .tools.formats import ToolCallStyle, find_tool_call_style


class PredictedText(msgspec.Struct, forbid_unknown_fields=True):
    """A part of a prediction."""

    type: Literal["text"]
    text: str


class Prediction(msgspec.Struct, forbid_unknown_fields=True):
    """Expected content of the answer, or long parts of it."""

    type: Literal["content"]
    content: str | list[PredictedText]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatCompletionBody(GenerationBody, kw_only=True, forbid_unknown_fields=True):
    """The request. ``max_completion_tokens`` overrides ``max_tokens``; without both, the model's length is the limit.

    vLLM's fields:
        prompt_logprobs: refused, since vLLM returns them outside of the choices, where this API has no field.
        add_generation_prompt, chat_template_kwargs: passed to the chat template.
        include_reasoning: whether reasoning is returned if it is split from the answer.

    ``reasoning_effort`` is passed to the chat template; "none" also sets the switches by which templates turn thinking
    off. ``reasoning``, ``thinking`` and ``enable_thinking`` are other APIs' names for it; their limit of tokens is
    ignored by models that cannot keep it. ``verbosity`` is passed to the template, too.
    """

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None
    reasoning: ReasoningOptions | None = None
    thinking: Thinking | bool | None = None
    enable_thinking: bool | None = None
    verbosity: Verbosity | None = None
    include_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    prediction: Prediction | None = None

    @property
    def ignored(self) -> list[str]:
        return [*super().ignored, *unknown_function_keys(self.tools)]


class PreparedChat(Prepared, kw_only=True, frozen=True):
    """A checked chat completion.

    Args:
        form: splits the text of each answer into content, reasoning and tool calls.
        num_top_logprobs: None if log probabilities were not requested.
    """

    id_prefix: str = "chatcmpl"
    num_top_logprobs: int | None
    includes_usage: bool
    form: AnswerForm
    style: ToolCallStyle

    def make_parser(self, *, whole: bool = False) -> AnswerParser:
        """Return a parser of one answer; ``whole`` if its text arrives in one piece."""
        return self.form.make_parser(whole=whole)

    def answer(self, *outputs: RequestOutput, response_id: str | None = None) -> ChatCompletion:
        """Return the response to one output; see ``Prepared.answer``."""
        (output,) = outputs
        response_id = response_id or output.request_id
        return ChatCompletion(
            **response_head(response_id, self.model or output.model),
            object="chat.completion",
            choices=[self._choice(completion, response_id) for completion in output.outputs],
            usage=Usage.sum_of([] if output.usage is None else [output.usage]),
        )

    def events(self, response_id: str, model: str) -> ChatChunks:
        """Return the chunk maker of one stream; see ``Prepared.events``."""
        return ChatChunks(self, response_id, model)

    def _choice(self, output: CompletionOutput, response_id: str) -> ChatChoice:
        finish_reason = finish_reason_of(output.finish_reason, has_output=bool(output.token_ids))
        assert finish_reason is not None
        parser = self.make_parser(whole=True)
        parser.begin(in_reasoning=output.begins_in_reasoning)
        parts = parser.feed(output.text).followed_by(parser.finish(is_cut=finish_reason == "length"))
        message = self._message(parts, response_id, output.index)
        return ChatChoice(
            index=output.index,
            message=message,
            logprobs=self.logprobs_of(output.logprobs),
            finish_reason=parser.finish_reason(finish_reason),
            stop_reason=stop_reason_of(output.finish_reason, output.stop_reason),
        )

    def _message(self, parts: MessageParts, response_id: str, choice: int) -> AssistantMessage:
        tool_calls = [
            self._call(call, call.get("id") or self.style.call_id(response_id, choice, call["index"]))
            for call in parts.tool_calls
        ]
        return AssistantMessage(
            role="assistant",
            refusal=None,
            content=parts.content or (None if tool_calls or parts.reasoning else ""),
            reasoning=parts.reasoning or UNSET,
            reasoning_content=parts.reasoning or UNSET,
            tool_calls=tool_calls or UNSET,
        )

    def _call(self, call: CallDelta, call_id: str) -> ToolCall:
        name, arguments = call["function"].get("name", ""), call["function"]["arguments"]
        if name in self.form.custom_tools:
            return ToolCall(id=call_id, type="custom", custom=CustomCall(name, decoded_input(arguments)))
        return ToolCall(id=call_id, type="function", function=FunctionCall(name, arguments))

    def logprobs_of(self, tokens: Any) -> ChatLogprobs | None:
        """Return the log probabilities of ``tokens``; None if the caller did not request them."""
        return None if self.num_top_logprobs is None else chat_logprobs(tokens or (), self.num_top_logprobs)


class ChatChunks:
    """The chunks of one stream; see ``ChunkMaker``."""

    def __init__(self, prepared: PreparedChat, response_id: str, model: str) -> None:
        self._prepared = prepared
        self._head = response_head(response_id, model)
        self._parsers: dict[int, AnswerParser] = {}
        self._inputs: dict[tuple[int, int], CustomInputReader] = {}  # of calls of custom tools, by choice and index
        self._usage = UsageCounter()

    def feed(self, delta: Delta, prompt: int = 0) -> ChatCompletionChunk | None:
        parser = self._parsers.get(delta.child)
        is_first = parser is None
        if parser is None:
            parser = self._parsers[delta.child] = self._prepared.make_parser()
            parser.begin(in_reasoning=delta.begins_in_reasoning)
        parts = parser.feed(delta.text)
        reason: OpenAIFinishReason | None = None
        if delta.finish_reason is not None:
            reason, parts = self._finish_choice(delta, delta.finish_reason, parser, parts)
            self._usage.add(prompt, delta.usage)
        logprobs = self._prepared.logprobs_of(delta.logprobs)
        if parts.is_empty and reason is None and not is_first and not (logprobs and logprobs.content):
            return None
        message = MessageDelta(
            role="assistant" if is_first else UNSET,
            content=parts.content if parts.content or is_first else UNSET,
            reasoning=parts.reasoning or UNSET,
            reasoning_content=parts.reasoning or UNSET,
            tool_calls=self._call_deltas(delta.child, parts.tool_calls, is_end=reason is not None) or UNSET,
        )
        return self._chunk(
            ChatChunkChoice(
                index=delta.child,
                delta=message,
                logprobs=logprobs if logprobs is not None else UNSET,
                finish_reason=reason,
                stop_reason=UNSET if reason is None else stop_reason_of(delta.finish_reason, delta.stop_reason),
            )
        )

    def end(self) -> ChatCompletionChunk | None:
        if not self._prepared.includes_usage:
            return None
        chunk = self._chunk()
        chunk.usage = self._usage.usage
        return chunk

    def _finish_choice(
        self, delta: Delta, reason: FinishReason, parser: AnswerParser, parts: MessageParts
    ) -> tuple[OpenAIFinishReason, MessageParts]:
        finish_reason = finish_reason_of(reason, has_output=delta.next_index > 0)
        assert finish_reason is not None
        parts = parts.followed_by(parser.finish(is_cut=finish_reason == "length"))
        return parser.finish_reason(finish_reason), parts

    def _call_deltas(self, choice: int, calls: list[CallDelta], *, is_end: bool) -> list[ToolCallDelta]:
        deltas = [self._call_delta(choice, call) for call in calls]
        if is_end:
            # An input in another form than expected is held back until the end.
            rests = [(index, self._inputs[choice, index].end_input()) for c, index in self._inputs if c == choice]
            deltas += [ToolCallDelta(index=i, custom=CustomCallDelta(input=rest)) for i, rest in rests if rest]
        return deltas

    def _call_delta(self, choice: int, call: CallDelta) -> ToolCallDelta:
        name, index = call["function"].get("name", UNSET), call["index"]
        arguments = call["function"]["arguments"]
        if name in self._prepared.form.custom_tools:
            self._inputs[choice, index] = CustomInputReader()
        reader = self._inputs.get((choice, index))
        delta = ToolCallDelta(index=index)
        if reader is None:
            delta.function = FunctionCallDelta(name=name, arguments=arguments)
        else:
            delta.custom = CustomCallDelta(name=name, input=reader.feed(arguments))
        if name is not UNSET:
            delta.id = call.get("id") or self._prepared.style.call_id(self._head["id"], choice, index)
            delta.type = "function" if reader is None else "custom"
        return delta

    def _chunk(self, *choices: ChatChunkChoice) -> ChatCompletionChunk:
        usage = None if self._prepared.includes_usage else UNSET
        return ChatCompletionChunk(**self._head, object="chat.completion.chunk", choices=list(choices), usage=usage)


def prepare_chat(body: ChatCompletionBody, parsers: Parsers | None = None) -> PreparedChat:
    """Translate a chat completion to a request, for a model with these parsers.

    Raises:
        OpenAIError: a field is invalid; it is named.
        ValidationError: a sampling parameter is invalid.
    """
    parsers = parsers or Parsers()
    num_top = _num_top_logprobs(body)
    options = body.request_options()
    if body.prediction is not None:
        options["prediction"] = body.prediction.text
    template_kwargs = dict(body.chat_template_kwargs or {})
    if body.add_generation_prompt is not None:
        template_kwargs["add_generation_prompt"] = body.add_generation_prompt
    template_kwargs = {**thinking_kwargs(body), **template_kwargs}
    if body.reasoning is not None and body.reasoning.exclude:
        body.include_reasoning = False
    form = answer_form(body, parsers, grammar=body.grammar(), template_kwargs=template_kwargs)
    template_kwargs |= form.template_kwargs
    if template_kwargs:
        options["chat_template_kwargs"] = template_kwargs
    return PreparedChat(
        prompts=[template_messages(body.messages, keeps_developer=parsers.takes_developer)],
        params=body.sampling_params(
            max_tokens=body.max_completion_tokens,
            logprobs=num_top,
            thinking_token_budget=thinking_budget(body) if parsers.thinks_before_grammar else None,
            structured_outputs=form.grammar,
            skip_special_tokens=False if form.needs_special_tokens else None,
        ),
        options=options,
        stream=bool(body.stream),
        num_top_logprobs=num_top,
        includes_usage=body.includes_usage,
        form=form,
        fields=form.grammar_fields,
        style=find_tool_call_style(parsers.tool_call),
    )


def _num_top_logprobs(body: ChatCompletionBody) -> int | None:
    if body.top_logprobs and not body.logprobs:
        raise bad_field("top_logprobs", f"top_logprobs={body.top_logprobs} needs logprobs=true")
    if not body.logprobs:
        return None
    num_top = body.top_logprobs or 0
    if not 0 <= num_top <= 20:
        raise bad_field("top_logprobs", f"top_logprobs must be in [0, 20], got {num_top}")
    return num_top
