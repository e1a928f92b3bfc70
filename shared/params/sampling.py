"""Parameters of a generation, with the names and meanings of vLLM's request parameters."""

from __future__ import annotations

import operator
from typing import Any

import msgspec

from ..errors import UnsupportedParameterError, ValidationError
from ..values.arguments import CheckedNames
from ..values.shown import shown
from .checks import (
    check_allowed_token_ids,
    check_bad_words,
    check_extra_args,
    check_logit_bias,
    check_number,
    check_stop,
    check_token_ids,
)
from .kinds import RequestOutputKind
from .prompts import check_truncation
from .structured import StructuredOutputsParams

MAX_SEED = 2**63 - 1
MAX_LOGPROBS = 20
MAX_N = 64
# name -> (type, lowest, highest); None is accepted where the field's default is None or says so.
_RANGES: dict[str, tuple[type, float, float]] = {
    "n": (int, 1, MAX_N),
    "presence_penalty": (float, -2.0, 2.0),
    "frequency_penalty": (float, -2.0, 2.0),
    "repetition_penalty": (float, 0.01, 100.0),
    "temperature": (float, 0.0, 100.0),
    "top_p": (float, 0.0, 1.0),
    "top_k": (int, -1, 2**31 - 1),
    "min_p": (float, 0.0, 1.0),
    "seed": (int, 0, MAX_SEED),
    "max_tokens": (int, 1, 2**31 - 1),
    "min_tokens": (int, 0, 2**31 - 1),
    "logprobs": (int, 0, MAX_LOGPROBS),
    "prompt_logprobs": (int, 0, MAX_LOGPROBS),
    "thinking_token_budget": (int, -1, 2**31 - 1),
}
_OPTIONAL = frozenset({"seed", "max_tokens", "logprobs", "prompt_logprobs", "thinking_token_budget"})
_BOOLEANS = (
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
)
_values_of_rules = operator.attrgetter(
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "repetition_detection",
    "structured_outputs",
    "truncate_prompt_tokens",
)
_NO_RULES = (None,) * 6
_NOT_YET_SERVED: dict[str, Any] = {"n": 1, "extra_args": None}
_values_not_yet_served = operator.attrgetter(*_NOT_YET_SERVED)
_DEFAULTS_NOT_YET_SERVED = tuple(_NOT_YET_SERVED.values())
MAX_PATTERN_SIZE = 2048
MAX_PATTERN_COUNT = 1000
_MASK = 2**64 - 1


class SamplingParams(
    msgspec.Struct, metaclass=CheckedNames, array_like=True, omit_defaults=True, frozen=True, kw_only=True, gc=False
):
    """Parameters for choosing tokens, and for stopping.

    Args:
        n: how many answers. The client asks for each with a request of its own, so an engine sees 1 only. At most 64.
        presence_penalty: taken off the logit of every token that the output has. Range [-2, 2].
        frequency_penalty: taken off it once for each time. Range [-2, 2].
        repetition_penalty: divides the positive logits, and multiplies the others, of every token that prompt or
            output has. Range [0.01, 100].
        temperature: 0 is greedy; otherwise logits are divided by it. Range [0, 100].
        top_p: keep the smallest set of tokens whose probability reaches it. Range (0, 1].
        top_k: keep the k most probable tokens; 0 or -1 keeps all.
        min_p: drop tokens less probable than ``min_p`` times the most probable one. Range [0, 1].
        seed: fixes the random stream; drawn by the client when None, so that a resumed
            generation continues with the same one.
        stop: strings that end the generation; not part of the output unless ``include_stop_str_in_output``.
        stop_token_ids: token ids that end the generation, as the end-of-sequence token does.
        ignore_eos: continue after the end-of-sequence token.
        max_tokens: max output tokens, at least 1; None means as many as ``max_model_len`` leaves.
        min_tokens: no end-of-sequence token, stop token or stop string before that many output tokens.
        logprobs: return each output token's log probability and rank, and those of this many most probable tokens,
            from the model's logits before penalties, temperature and filters. None returns nothing; at most 20.
        prompt_logprobs: the same for every prompt token but the first, returned with the first output token; at most
            262144 log probabilities in all. Answers beyond the first of ``n`` do without.
        detokenize: False returns token ids only, and needs no ``stop`` strings.
        skip_special_tokens: leave special tokens out of the text.
        spaces_between_special_tokens: False takes the space out between special tokens that follow each other, where
            the tokenizer's decoder puts one (WordPiece and word-level decoders do; byte-level BPE and SentencePiece
            never) and ``skip_special_tokens`` is False.
        output_kind: whether an item of a stream has the new part of the output, all of it so far, or the whole once.
        logit_bias: added to the logits of these tokens, before penalties. Range [-100, 100]; at most 16384 tokens.
        allowed_token_ids: no other token is chosen. At most 16384.
        bad_words: strings that the output shall not hold. Each is tokenized as it begins a text and as it follows a
            space; where the last output tokens are such a sequence but for its last token, that token is not chosen.
            Other ways to spell the same string in tokens stay open. At most 1024.
        thinking_token_budget: most tokens between the start and the end of thinking; then the end is forced. Needs a
            model with tokens for both. -1 is no limit. With ``structured_outputs`` only tokens before them count.
        repetition_detection: end with finish_reason "repetition" when the output repeats itself.
        extra_args: ``{"logits_processors": {name: {argument: value}}}`` selects logits processors that the operator has
            configured at the engine, in this order. Nothing else.
        truncate_prompt_tokens: keep that many last tokens of the prompt, and -1 as many as leave ``max_tokens`` (one,
            if that is None) their room in the model's length. Special tokens that the model expects around a text are
            kept. None keeps all, so that a prompt that is too long is refused.
        bad_words_token_ids, think_token_ids: token ids of ``bad_words``, and of the start and end of thinking, which
            the worker process sets; not for callers.

    Where ``allowed_token_ids``, ``bad_words`` and ``min_tokens`` leave no token, ``min_tokens`` gives way, then
    ``bad_words``. The forced end of thinking goes before all of them.

    Raises:
        ValidationError: a value has the wrong type or range; the message names the field and the value.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.DELTA
    structured_outputs: StructuredOutputsParams | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    thinking_token_budget: int | None = None
    extra_args: dict[str, Any] | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    bad_words_token_ids: list[list[int]] | None = None
    think_token_ids: tuple[int, int] | None = None
    truncate_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        for name, (kind, low, high) in _RANGES.items():
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL:
                check_number(name, value, kind, low, high)
        for name in _BOOLEANS:
            if not isinstance(getattr(self, name), bool):
                raise ValidationError(f"{name} must be True or False, got {shown(getattr(self, name))}")
        if self.stop is not None:
            check_stop(self.stop, detokenize=self.detokenize)
        if self.stop_token_ids is not None:
            check_token_ids("stop_token_ids", self.stop_token_ids)
        if _values_of_rules(self) != _NO_RULES:
            self._check_rules()
        if self.top_p == 0:
            raise ValidationError("top_p must be in (0, 1], got 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValidationError(f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}")

    @property
    def stop_strings(self) -> list[str]:
        """Stop strings as a list, in whichever form they were passed."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is taken, without randomness."""
        return self.temperature == 0.0

    @property
    def is_thinking_limited(self) -> bool:
        """Whether there is a ``thinking_token_budget``."""
        return self.thinking_token_budget is not None and self.thinking_token_budget >= 0

    def check_from_caller(self) -> None:
        """Refuse fields that only a worker process sets.

        Raises:
            ValidationError: one of its fields is set.
        """
        if self.bad_words_token_ids is not None:
            raise ValidationError("bad_words_token_ids is set by the worker; pass bad_words")
        if self.think_token_ids is not None:
            raise ValidationError("think_token_ids is set by the worker; pass thinking_token_budget alone")

    def check_supported(self, **served: Any) -> None:
        """Refuse parameters that this version does not support yet; ``served`` are those that the caller handles.

        Raises:
            UnsupportedParameterError: a parameter differs from its default and no engine here can serve it.
        """
        if _values_not_yet_served(self) == _DEFAULTS_NOT_YET_SERVED:
            return
        for name, default in _NOT_YET_SERVED.items():
            value = getattr(self, name)
            if name == "extra_args" and value is not None:
                check_extra_args(value)
            elif value != default and (name not in served or value != served[name]):
                raise UnsupportedParameterError(
                    f"{name}={shown(value)} is not supported by this version; leave it at {shown(default)}"
                )

    def _check_rules(self) -> None:
        """Check the fields that limit which tokens may be chosen; most requests have none."""
        if self.logit_bias is not None:
            check_logit_bias(self.logit_bias)
        if self.allowed_token_ids is not None:
            check_allowed_token_ids(self.allowed_token_ids)
        if self.bad_words is not None:
            check_bad_words(self.bad_words)
        if self.truncate_prompt_tokens is not None:
            check_truncation(self.truncate_prompt_tokens)
        if not isinstance(self.repetition_detection, RepetitionDetectionParams | None):
            raise ValidationError(
                f"repetition_detection must be a RepetitionDetectionParams, got {shown(self.repetition_detection)}"
            )
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            raise ValidationError(
                f"structured_outputs must be a StructuredOutputsParams, got {shown(self.structured_outputs)}"
            )
        grammar = self.structured_outputs
        if grammar is not None and grammar.enable_in_reasoning and self.is_thinking_limited:
            raise ValidationError(
                "structured_outputs.enable_in_reasoning=True holds from the first token on, so it leaves no room for "
                f"thinking; leave thinking_token_budget at None, got {self.thinking_token_budget}"
            )


class RepetitionFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of ``RepetitionDetectionParams``, and of ``repetition_detection`` in a body."""

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0


class RepetitionDetectionParams(
    RepetitionFields, metaclass=CheckedNames, array_like=True, omit_defaults=True, frozen=True, kw_only=True, gc=False
):
    """End a generation whose last output tokens are ``min_count`` times the same pattern.

    Args:
        max_pattern_size: longest pattern to look for, in tokens; 0 looks for none. Range [0, 2048].
        min_pattern_size: shortest one; 0 means 1. At most ``max_pattern_size``.
        min_count: how often the pattern comes. Range [2, 1000].

    Raises:
        ValidationError: a value has the wrong type or range.
    """

    def __post_init__(self) -> None:
        check_number("repetition_detection.max_pattern_size", self.max_pattern_size, int, 0, MAX_PATTERN_SIZE)
        check_number("repetition_detection.min_pattern_size", self.min_pattern_size, int, 0, MAX_PATTERN_SIZE)
        if self.min_pattern_size > self.max_pattern_size:
            raise ValidationError(
                "repetition_detection.min_pattern_size must be at most max_pattern_size "
                f"({self.max_pattern_size}), got {self.min_pattern_size}"
            )
        fewest = 2 if self.max_pattern_size else 0
        check_number("repetition_detection.min_count", self.min_count, int, fewest, MAX_PATTERN_COUNT)


def derived_seed(seed: int, number: int) -> int:
    """Return seed ``number`` of those that follow from ``seed``: ``seed`` itself for 0, else 63 bits of SplitMix64's
    ``number``-th output.

    Source: Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators". Never to be changed: a repeated
    request has to get the same answers from every version.
    """
    if number == 0:
        return seed
    mixed = (seed + number * 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return (mixed ^ (mixed >> 31)) >> 1
