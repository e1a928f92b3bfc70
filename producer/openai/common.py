"""What the bodies of chat completions and of completions have in common: sampling fields, usage, ids, ends."""

from __future__ import annotations

import os
import time
from typing import Any, Literal, Protocol, TypedDict

import msgspec

from ...shared.errors import ValidationError
from ...shared.messages.outcome import FinishReason
from ...shared.messages.outcome import Usage as TokenCounts
from ...shared.params.extra_args import check_extra_args
from ...shared.params.repetition import RepetitionDetectionParams, RepetitionFields
from ...shared.params.sampling import MAX_SEED, SamplingParams
from ...shared.params.structured import GrammarFields, StructuredOutputsParams
from ..inputs.options import MAX_SESSION_ID_CHARS, RequestOptions
from .errors import bad_field, cancelled, expired

# Which build answered; OpenAI's callers compare it to see whether answers to the same seed may differ.
SYSTEM_FINGERPRINT = "penstock"

# Of an id after its dash: time and chance; the fingerprint of a body.
_NUM_DIGITS, _NUM_FINGERPRINT_DIGITS = 32, 8

OpenAIFinishReason = Literal["stop", "length", "tool_calls", "content_filter", "function_call"]


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What a stream tells beside the text: with ``include_usage`` its last chunk has the usage, and no choices."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class StructuredOutputs(GrammarFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's ``structured_outputs``: exactly one grammar; see ``StructuredOutputsParams``."""


class RepetitionDetection(RepetitionFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's ``repetition_detection``; see ``RepetitionDetectionParams``."""


class GenerationBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields that mean the same in a chat completion and in a completion; null is the default of each.

    From OpenAI: those up to ``user``, of which those after ``stream_options`` say nothing to a server of one's own and
    are passed over, but ``prompt_cache_key``, which is a ``session_id``. From vLLM: the next, with the meaning that
    ``SamplingParams`` gives, or the option ``tokenization_kwargs``; ``vllm_xargs`` are its ``extra_args``. ``band``,
    ``timeout_s``, ``session_id`` and ``resume`` are Penstock's.
    """

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    thinking_token_budget: int | None = None
    vllm_xargs: dict[str, Any] | None = None
    repetition_detection: RepetitionDetection | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None

    band: str | None = None
    timeout_s: float | None = None
    session_id: str | None = None
    resume: str | None = None

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a chunk that has the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def check_stream(self) -> None:
        """Refuse what no stream of ours tells.

        Raises:
            OpenAIError: 400, the field is named.
        """
        if self.stream_options is None:
            return
        asks_for_something = any(msgspec.structs.astuple(self.stream_options))
        if asks_for_something and not self.stream:
            raise bad_field("stream_options", "stream_options needs stream=true; leave it out")
        if self.stream_options.continuous_usage_stats:
            raise bad_field(
                "stream_options.continuous_usage_stats",
                "stream_options.continuous_usage_stats is not supported; include_usage tells the usage at the end",
                code="unsupported_parameter",
            )

    def sampling_params(self, **of_endpoint: Any) -> SamplingParams:
        """Return what the body asks for; ``of_endpoint`` goes before it, and None there is the default, too.

        Raises:
            ValidationError: a value is out of range; the message names the field.
        """
        values = {name: value for name in _PLAIN_FIELDS if (value := getattr(self, name)) not in (None, {})}
        values |= {name: value for name, value in of_endpoint.items() if value is not None}
        if self.seed is not None:
            values["seed"] = self.seed & MAX_SEED  # OpenAI's may be negative
        if self.repetition_detection is not None:
            values["repetition_detection"] = RepetitionDetectionParams(
                **msgspec.structs.asdict(self.repetition_detection)
            )
        if self.vllm_xargs:
            check_extra_args(self.vllm_xargs, "vllm_xargs")
            values["extra_args"] = self.vllm_xargs
        if "structured_outputs" not in values and (grammar := self.grammar()) is not None:
            values["structured_outputs"] = grammar
        return SamplingParams(**{"max_tokens": None, **values})

    def request_options(self) -> RequestOptions:
        """Return what the body says beside prompt and sampling."""
        options = plain_options(self)
        if self.session_id is not None:
            options["session_id"] = self.session_id
        elif self.prompt_cache_key:
            options["session_id"] = self.prompt_cache_key[:MAX_SESSION_ID_CHARS]
        if self.resume is not None:
            options["resume"] = self.resume
        if self.add_special_tokens is not None:
            options["tokenization_kwargs"] = {
                **(options.get("tokenization_kwargs") or {}),
                "add_special_tokens": self.add_special_tokens,
            }
        return options

    def grammar(self) -> StructuredOutputsParams | None:
        """``structured_outputs``, or the ``guided_*`` that vLLM had before it."""
        guided = {name: value for name in _GUIDED if (value := getattr(self, f"guided_{name}")) is not None}
        if self.structured_outputs is None:
            return StructuredOutputsParams(**guided) if guided else None
        if guided:
            raise ValidationError(f"guided_{next(iter(guided))} and structured_outputs are the same; pass one of them")
        return StructuredOutputsParams(**msgspec.structs.asdict(self.structured_outputs))


class _Placed(Protocol):
    @property
    def model(self) -> str | None: ...
    @property
    def band(self) -> str | None: ...
    @property
    def timeout_s(self) -> float | None: ...
    @property
    def priority(self) -> int | None: ...
    @property
    def cache_salt(self) -> str | None: ...
    @property
    def truncate_prompt_tokens(self) -> int | None: ...
    @property
    def truncation_side(self) -> str | None: ...


def plain_options(body: _Placed) -> RequestOptions:
    """Return the options that bodies of all endpoints have under the same names."""
    options = RequestOptions(model=body.model or None)
    if body.band is not None:
        options["band"] = body.band
    if body.timeout_s is not None:
        options["timeout_s"] = body.timeout_s
    if body.priority is not None:
        options["priority"] = body.priority
    if body.cache_salt is not None:
        options["cache_salt"] = body.cache_salt
    tokenization = {"truncate_prompt_tokens": body.truncate_prompt_tokens, "truncation_side": body.truncation_side}
    if any(value is not None for value in tokenization.values()):
        options["tokenization_kwargs"] = {name: value for name, value in tokenization.items() if value is not None}
    return options


# Same name and meaning in SamplingParams.
_PLAIN_FIELDS = (
    "n",
    "temperature",
    "top_p",
    "max_tokens",
    "stop",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "top_k",
    "min_p",
    "repetition_penalty",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "allowed_token_ids",
    "bad_words",
    "thinking_token_budget",
)
_GUIDED = ("json", "regex", "choice", "grammar", "whitespace_pattern")


class PromptTokensDetails(msgspec.Struct):
    """``cached_tokens`` of the prompt were in the engine's cache."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    """Of a prediction, the tokens that are in the completions, and those that are not."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(msgspec.Struct):
    """Tokens of one response: the prompt counts once, whatever ``n``. Details come with a prediction."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | msgspec.UnsetType = msgspec.UNSET

    @classmethod
    def of(cls, counts: list[TokenCounts]) -> Usage:
        """Return the sum over several prompts."""
        num_prompt_tokens = sum(usage.num_prompt_tokens for usage in counts)
        num_output_tokens = sum(usage.num_output_tokens for usage in counts)
        cached = PromptTokensDetails(sum(usage.num_cached_tokens for usage in counts))
        num_accepted = sum(usage.num_accepted_prediction_tokens for usage in counts)
        num_rejected = sum(usage.num_rejected_prediction_tokens for usage in counts)
        details = CompletionTokensDetails(num_accepted, num_rejected) if num_accepted or num_rejected else msgspec.UNSET
        return cls(num_prompt_tokens, num_output_tokens, num_prompt_tokens + num_output_tokens, cached, details)


class UsageCounter:
    """The usage of a stream, from the last deltas of all its answers."""

    def __init__(self) -> None:
        self._counts: dict[int, TokenCounts] = {}

    def add(self, prompt: int, counts: TokenCounts | None) -> None:
        """Count one answer to prompt number ``prompt``; answers to the same prompt share its tokens."""
        if counts is None:
            return
        before = self._counts.get(prompt)
        if before is not None:
            counts = TokenCounts(
                max(before.num_prompt_tokens, counts.num_prompt_tokens),
                before.num_output_tokens + counts.num_output_tokens,
                min(before.num_cached_tokens, counts.num_cached_tokens),
                before.num_accepted_prediction_tokens + counts.num_accepted_prediction_tokens,
                before.num_rejected_prediction_tokens + counts.num_rejected_prediction_tokens,
            )
        self._counts[prompt] = counts

    @property
    def usage(self) -> Usage:
        return Usage.of(list(self._counts.values()))


class ResponseHead(TypedDict):
    """What the bodies and the chunks of one response begin with."""

    id: str
    created: int
    model: str
    system_fingerprint: str


def response_head(response_id: str, model: str) -> ResponseHead:
    """Return it; ``created`` follows from the id."""
    created = created_at(response_id)
    return {"id": response_id, "created": created, "model": model, "system_fingerprint": SYSTEM_FINGERPRINT}


def new_id(prefix: str, fingerprint: str = "") -> str:
    """Return an id for a response: its first eight digits after the dash are when it was made (see ``created_at``).

    ``fingerprint`` stands at its end: eight digits that say which body asked for it, where that matters.
    """
    return f"{prefix}-{int(time.time()):08x}{os.urandom(12).hex()}{fingerprint}"


def fingerprint_of(response_id: str) -> str:
    """Return the fingerprint of the body that a response answers; empty if its id has none."""
    digits = response_id.partition("-")[2]
    return digits[_NUM_DIGITS:] if len(digits) == _NUM_DIGITS + _NUM_FINGERPRINT_DIGITS else ""


def created_at(response_id: str) -> int:
    """Return the Unix time at which ``new_id`` made an id; the time now of any other.

    So a stream that another process goes on with has the same ``created`` in every chunk.
    """
    _, _, digits = response_id.partition("-")
    try:
        has_time = len(digits) in (_NUM_DIGITS, _NUM_DIGITS + _NUM_FINGERPRINT_DIGITS)
        return int(digits[:8], 16) if has_time else int(time.time())
    except ValueError:
        return int(time.time())


def finish_reason_of(reason: FinishReason | None, *, has_output: bool) -> OpenAIFinishReason | None:
    """Return OpenAI's word for an end; ours stands in ``stop_reason`` where theirs says less.

    Raises:
        OpenAIError: there is no answer: 499, the request was cancelled; 408, it expired before it had any output.
    """
    if reason is None:
        return None
    if reason in (FinishReason.CANCELLED, FinishReason.ABORT):
        raise cancelled()
    if reason == FinishReason.EXPIRED and not has_output:
        raise expired()
    return "stop" if reason in (FinishReason.STOP, FinishReason.REPETITION) else "length"


def stop_reason_of(reason: FinishReason | None, stop_reason: int | str | None) -> int | str | None:
    """Return vLLM's ``stop_reason``: the string or token id that ended it, or our own word for the end."""
    if reason in (FinishReason.REPETITION, FinishReason.EXPIRED, FinishReason.ENGINE_LOST):
        return str(reason)
    return stop_reason
