"""POST /v1/completions: the body, the response and the chunks of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from ...shared.messages.deltas import Delta
from ...shared.messages.outcome import Usage as TokenCounts
from ..inputs.prompt import Prompt
from ..results.outputs import CompletionOutput, RequestOutput
from .answers.ends import OpenAIFinishReason, finish_reason_of, stop_reason_of
from .answers.logprobs import CompletionLogprobs, completion_logprobs, num_chars
from .answers.response_ids import response_head
from .answers.usage import Usage, UsageCounter
from .errors import bad_field
from .generation_body import GenerationBody
from .prepared import Prepared

# OpenAI's default, and vLLM's.
DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 2048


class CompletionBody(GenerationBody, kw_only=True, forbid_unknown_fields=True):
    """The request. ``prompt`` is text, token ids, or a list of either: each gets ``n`` answers.

    ``max_tokens=0`` with ``echo`` returns the prompt alone, with its log probabilities if ``logprobs`` asks for them.
    """

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One answer; ``index`` counts answers of the first prompt, then those of the second. ``stop_reason`` is vLLM's."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: OpenAIFinishReason | None
    stop_reason: int | str | None


class Completion(msgspec.Struct, kw_only=True):
    """The response, and with ``finish_reason`` null where a choice goes on, the chunk of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str


class PreparedCompletion(Prepared, kw_only=True, frozen=True):
    """``is_prompt_alone`` says that the one token the engine must make is not told."""

    id_prefix: str = "cmpl"
    has_echo: bool
    has_logprobs: bool
    is_prompt_alone: bool
    includes_usage: bool

    def answer(self, *outputs: RequestOutput, response_id: str | None = None) -> Completion:
        """As ``Prepared.answer``, of one output for each prompt."""
        response_id = response_id or outputs[0].request_id
        choices = [
            self._choice(position, one, output) for position, output in enumerate(outputs) for one in output.outputs
        ]
        counts = [self.counts_told(output.usage) for output in outputs if output.usage is not None]
        return Completion(
            **response_head(response_id, self.model or outputs[0].model),
            object="text_completion",
            choices=choices,
            usage=Usage.of(counts),
        )

    def events(self, response_id: str, model: str) -> CompletionChunks:
        """As ``Prepared.events``."""
        return CompletionChunks(self, response_id, model)

    def counts_told(self, counts: TokenCounts) -> TokenCounts:
        """The usage without a token that is not told."""
        return msgspec.structs.replace(counts, num_output_tokens=0) if self.is_prompt_alone else counts

    def _choice(self, position: int, one: CompletionOutput, output: RequestOutput) -> CompletionChoice:
        # The last delta of one answer says all that the output does.
        whole = Delta(
            token_ids=one.token_ids,
            text=one.text,
            finish_reason=one.finish_reason,
            stop_reason=one.stop_reason,
            logprobs=one.logprobs or [],
            prompt_logprobs=[token for token in output.prompt_logprobs or () if token is not None],
            first_prompt_token=output.first_prompt_token,
        )
        return ChoiceTeller(self, position, one.index).tell(whole)


class ChoiceTeller:
    """One choice, delta by delta: where its prompt is told, and how far its text has come."""

    def __init__(self, prepared: PreparedCompletion, prompt: int, child: int) -> None:
        self._prepared = prepared
        self._prompt = prepared.prompts[prompt]
        self._index = prompt * prepared.params.n + child
        self._has_begun = False
        self._offset = 0

    def tell(self, delta: Delta) -> CompletionChoice:
        """Return what ``delta`` adds to the choice.

        Raises:
            OpenAIError: the request ended without an answer.
        """
        reason = finish_reason_of(delta.finish_reason, has_output=delta.next_index > 0)
        is_alone = self._prepared.is_prompt_alone
        text = "" if is_alone else delta.text
        tokens, first = [] if is_alone else delta.logprobs, None
        if self._prepared.has_echo and not self._has_begun:
            text = self._prompt_text(delta) + text
            tokens, first = [*delta.prompt_logprobs, *tokens], delta.first_prompt_token
        self._has_begun = True
        logprobs = None
        if self._prepared.has_logprobs:
            logprobs = completion_logprobs(tokens, first=first, offset=self._offset)
            self._offset += num_chars(logprobs)
        stop_reason = stop_reason_of(delta.finish_reason, delta.stop_reason)
        return CompletionChoice(
            index=self._index,
            text=text,
            logprobs=logprobs,
            finish_reason="length" if reason is not None and is_alone else reason,
            stop_reason=None if is_alone else stop_reason,
        )

    def _prompt_text(self, delta: Delta) -> str:
        if isinstance(self._prompt, str):
            return self._prompt
        first = [delta.first_prompt_token[1]] if delta.first_prompt_token is not None else []
        return b"".join(first + [token.texts[0] for token in delta.prompt_logprobs if token.texts]).decode(
            errors="replace"
        )


class CompletionChunks:
    """The chunks of one stream: see ``ChunkMaker``."""

    def __init__(self, prepared: PreparedCompletion, response_id: str, model: str) -> None:
        self._prepared = prepared
        self._head = response_head(response_id, model)
        self._tellers: dict[tuple[int, int], ChoiceTeller] = {}
        self._usage = UsageCounter()

    def feed(self, delta: Delta, prompt: int = 0) -> Completion | None:
        key = (prompt, delta.child)
        teller = self._tellers.get(key)
        if teller is None:
            teller = self._tellers[key] = ChoiceTeller(self._prepared, *key)
        if delta.usage is not None:
            self._usage.add(prompt, self._prepared.counts_told(delta.usage))
        choice = teller.tell(delta)
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
    """Return what a completion asks for.

    Raises:
        OpenAIError: a field is wrong; it is named.
        ValidationError: the same, of a sampling parameter.
    """
    body.check_stream()
    _check_combinations(body)
    prompts = _prompts(body.prompt)
    has_echo = bool(body.echo)
    is_prompt_alone = has_echo and body.max_tokens == 0
    prompt_logprobs = None
    if has_echo and (body.logprobs is not None or not all(isinstance(prompt, str) for prompt in prompts)):
        prompt_logprobs = body.logprobs or 0  # with them comes the text of each token
    # The client calls a single prompt by no number; the body may hold it in a list.
    is_only_item = len(prompts) == 1 and prompts[0] != body.prompt
    return PreparedCompletion(
        prompts=prompts,
        fields={"prompt": "prompt[0]"} if is_only_item else {},
        params=body.sampling_params(
            max_tokens=1 if is_prompt_alone else DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
            logprobs=body.logprobs,
            prompt_logprobs=prompt_logprobs,
        ),
        options=body.request_options(),
        stream=bool(body.stream),
        has_echo=has_echo,
        has_logprobs=body.logprobs is not None,
        is_prompt_alone=is_prompt_alone,
        includes_usage=body.includes_usage,
    )


def _check_combinations(body: CompletionBody) -> None:
    n = 1 if body.n is None else body.n
    if body.suffix:
        raise bad_field("suffix", "suffix is not supported: no model here fills in the middle; leave it out")
    if body.best_of is not None and body.best_of != n:
        raise bad_field("best_of", f"best_of must be n ({n}), got {body.best_of}: all answers are returned")
    if body.echo and n > 1 and not isinstance(body.prompt, str):
        raise bad_field("echo", f"echo with n={n} needs a single prompt of text")
    if body.echo and body.logprobs is not None and n > 1:
        raise bad_field("echo", f"echo with logprobs is told for one answer only, got n={n}")


def _prompts(prompt: str | Sequence[str | int | list[int]]) -> list[Prompt]:
    """The prompts one by one; each is checked as the client checks it."""
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
