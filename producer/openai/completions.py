"""POST /v1/completions: the body, the response and the chunks of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from ...shared.messages.deltas import Delta
from ...shared.messages.outcome import Usage as TokenCounts
from ..inputs.prompt import Prompt
from ..results import CompletionOutput, RequestOutput, whole_delta
from .answers.common import OpenAIFinishReason, Usage, UsageCounter, finish_reason_of, response_head, stop_reason_of
from .answers.logprobs import CompletionLogprobs, completion_logprobs, output_offsets, own_bytes, prompt_offsets
from .errors import bad_field
from .generation_body import GenerationBody
from .prepared import Prepared

# OpenAI's default, and vLLM's.
DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 2048


class CompletionBody(GenerationBody, kw_only=True, forbid_unknown_fields=True):
    """The request. ``prompt`` is text, token ids, or a list of either; each prompt gets ``n`` answers.

    ``max_tokens=0`` with ``echo`` returns the prompt alone, with its log probabilities if ``logprobs`` requests them.
    """

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None


class CompletionChoice(msgspec.Struct, kw_only=True):
    """An answer. ``index`` counts the answers of the first prompt, then those of the second. ``stop_reason`` is
    vLLM's."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: OpenAIFinishReason | None
    stop_reason: int | str | None


class Completion(msgspec.Struct, kw_only=True):
    """The response, or a chunk of a stream: ``finish_reason`` is null for a choice that continues."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str


class PreparedCompletion(Prepared, kw_only=True, frozen=True):
    """A checked completion. ``returns_prompt_only``: the engine must generate one token, which the response omits."""

    id_prefix: str = "cmpl"
    has_echo: bool
    has_logprobs: bool
    returns_prompt_only: bool
    includes_usage: bool

    def answer(self, *outputs: RequestOutput, response_id: str | None = None) -> Completion:
        """Return the response to one output per prompt; see ``Prepared.answer``."""
        response_id = response_id or outputs[0].request_id
        choices = [
            self._choice(position, completion, output)
            for position, output in enumerate(outputs)
            for completion in output.outputs
        ]
        usages = [self.usage_without_hidden_token(output.usage) for output in outputs if output.usage is not None]
        return Completion(
            **response_head(response_id, self.model or outputs[0].model),
            object="text_completion",
            choices=choices,
            usage=Usage.sum_of(usages),
        )

    def events(self, response_id: str, model: str) -> CompletionChunks:
        """Return the chunk maker of one stream; see ``Prepared.events``."""
        return CompletionChunks(self, response_id, model)

    def usage_without_hidden_token(self, counts: TokenCounts) -> TokenCounts:
        """Return the usage without the token that the response omits."""
        return msgspec.structs.replace(counts, num_output_tokens=0) if self.returns_prompt_only else counts

    def _choice(self, position: int, completion: CompletionOutput, output: RequestOutput) -> CompletionChoice:
        return ChoiceWriter(self, position, completion.index).feed(whole_delta(output, completion))


class ChoiceWriter:
    """Writer of one choice, delta by delta. It tracks whether the prompt was echoed, and the offset in the text."""

    def __init__(self, prepared: PreparedCompletion, prompt: int, child: int) -> None:
        self._prepared = prepared
        self._prompt = prepared.prompts[prompt]
        self._index = prompt * prepared.params.n + child
        self._has_started = False
        self._offset = 0

    def feed(self, delta: Delta) -> CompletionChoice:
        """Return the part of the choice that ``delta`` adds.

        Raises:
            OpenAIError: the request ended without an answer.
        """
        reason = finish_reason_of(delta.finish_reason, has_output=delta.next_index > 0)
        omits_output = self._prepared.returns_prompt_only
        echo = self._prompt_text(delta) if self._prepared.has_echo and not self._has_started else None
        self._has_started = True
        text = (echo or "") + ("" if omits_output else delta.text)
        logprobs = self._logprobs(delta, echo) if self._prepared.has_logprobs else None
        self._offset += len(text)
        stop_reason = stop_reason_of(delta.finish_reason, delta.stop_reason)
        return CompletionChoice(
            index=self._index,
            text=text,
            logprobs=logprobs,
            finish_reason="length" if reason is not None and omits_output else reason,
            stop_reason=None if omits_output else stop_reason,
        )

    def _logprobs(self, delta: Delta, echo: str | None) -> CompletionLogprobs:
        """Return the log probabilities of ``delta``, with those of the prompt if its text ``echo`` comes first."""
        tokens, offsets, first, start = [], [], None, self._offset
        if echo is not None:
            tokens, first, start = delta.prompt_logprobs, delta.first_prompt_token, start + len(echo)
            offsets = prompt_offsets(_prompt_bytes(delta), echo)
        if not self._prepared.returns_prompt_only:
            tokens, offsets = [*tokens, *delta.logprobs], [*offsets, *output_offsets(delta, start)]
        return completion_logprobs(tokens, offsets, first=first)

    def _prompt_text(self, delta: Delta) -> str:
        if isinstance(self._prompt, str):
            return self._prompt
        return b"".join(_prompt_bytes(delta)).decode(errors="replace")


def _prompt_bytes(delta: Delta) -> list[bytes]:
    """Return the bytes of each token of the prompt, which a delta with log probabilities of the prompt has."""
    first = [] if delta.first_prompt_token is None else [delta.first_prompt_token[1]]
    return first + [own_bytes(token) or b"" for token in delta.prompt_logprobs]


class CompletionChunks:
    """The chunks of one stream; see ``ChunkMaker``."""

    def __init__(self, prepared: PreparedCompletion, response_id: str, model: str) -> None:
        self._prepared = prepared
        self._head = response_head(response_id, model)
        self._writers: dict[tuple[int, int], ChoiceWriter] = {}
        self._usage = UsageCounter()

    def feed(self, delta: Delta, prompt: int = 0) -> Completion | None:
        key = (prompt, delta.child)
        writer = self._writers.get(key)
        if writer is None:
            writer = self._writers[key] = ChoiceWriter(self._prepared, *key)
        if delta.usage is not None:
            self._usage.add(prompt, self._prepared.usage_without_hidden_token(delta.usage))
        choice = writer.feed(delta)
        if not choice.text and choice.finish_reason is None and not (choice.logprobs and choice.logprobs.tokens):
            return None
        return self._chunk(choice)

    def end(self) -> Completion | None:
        if not self._prepared.includes_usage:
            return None
        chunk = self._chunk()
        chunk.usage = self._usage.usage
        return chunk

    def _chunk(self, *choices: CompletionChoice) -> Completion:
        usage = None if self._prepared.includes_usage else UNSET
        return Completion(**self._head, object="text_completion", choices=list(choices), usage=usage)


def prepare_completion(body: CompletionBody) -> PreparedCompletion:
    """Translate a completion to requests.

    Raises:
        OpenAIError: a field is invalid; it is named.
        ValidationError: a sampling parameter is invalid.
    """
    _check_combinations(body)
    prompts = _prompts(body.prompt)
    has_echo = bool(body.echo)
    returns_prompt_only = has_echo and body.max_tokens == 0
    prompt_logprobs = None
    if has_echo and (body.logprobs is not None or not all(isinstance(prompt, str) for prompt in prompts)):
        prompt_logprobs = body.logprobs or 0  # they include the text of each token
    # The client names a single prompt without a number, but the body may have it in a list.
    is_only_item = len(prompts) == 1 and prompts[0] != body.prompt
    return PreparedCompletion(
        prompts=prompts,
        fields={"prompt": "prompt[0]"} if is_only_item else {},
        params=body.sampling_params(
            max_tokens=1 if returns_prompt_only else DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
            logprobs=body.logprobs,
            prompt_logprobs=prompt_logprobs,
        ),
        options=body.request_options(),
        stream=bool(body.stream),
        has_echo=has_echo,
        has_logprobs=body.logprobs is not None,
        returns_prompt_only=returns_prompt_only,
        includes_usage=body.includes_usage,
    )


def _check_combinations(body: CompletionBody) -> None:
    n = 1 if body.n is None else body.n
    if body.suffix:
        raise bad_field("suffix", "suffix is not supported: fill-in-the-middle is not implemented; leave it out")
    if body.best_of is not None and body.best_of != n:
        raise bad_field("best_of", f"best_of must be n ({n}), got {body.best_of}: all answers are returned")
    if body.echo and n > 1 and not isinstance(body.prompt, str):
        raise bad_field("echo", f"echo with n={n} needs a single prompt of text")
    if body.echo and body.logprobs is not None and n > 1:
        raise bad_field("echo", f"echo with logprobs is supported for one answer only, got n={n}")


def _prompts(prompt: str | Sequence[str | int | list[int]]) -> list[Prompt]:
    """Return the prompts as a list. The client checks each."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise bad_field("prompt", "prompt must not be empty, got []")
    token_ids = [item for item in prompt if isinstance(item, int)]
    if len(token_ids) == len(prompt):
        return [token_ids]
    several: list[Prompt] = [item for item in prompt if not isinstance(item, int)]
    if len({type(item) for item in prompt}) > 1:
        raise bad_field("prompt", "prompt must be text, token ids, a list of texts or a list of lists of token ids")
    if len(several) > MAX_PROMPTS:
        raise bad_field("prompt", f"prompt must hold at most {MAX_PROMPTS} prompts, got {len(several)}")
    return several
