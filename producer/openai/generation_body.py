"""Common parts of the bodies of chat completions and completions: sampling fields and options."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec

from ...shared.errors import ValidationError
from ...shared.params.checks import check_extra_args
from ...shared.params.sampling import MAX_SEED, RepetitionDetectionParams, RepetitionFields, SamplingParams
from ...shared.params.structured import GrammarFields, StructuredOutputsParams
from ..inputs.options import MAX_SESSION_ID_CHARS, RequestOptions


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Options of a stream. With ``include_usage`` its last chunk has the usage, and no choices.

    The others have no effect.
    """

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class StructuredOutputs(GrammarFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's ``structured_outputs``: exactly one grammar; see ``StructuredOutputsParams``."""


class RepetitionDetection(RepetitionFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's ``repetition_detection``; see ``RepetitionDetectionParams``."""


# Fields of ``SamplingParams`` that bodies declare themselves, or lack.
_IN_OPENAI = (
    "n", "temperature", "top_p", "max_tokens", "stop", "seed", "presence_penalty", "frequency_penalty", "logit_bias",
)  # fmt: skip
_IN_ANOTHER_FORM = ("structured_outputs", "repetition_detection", "extra_args", "truncate_prompt_tokens", "logprobs")
_IN_PYTHON_ONLY = ("prompt_logprobs", "detokenize", "output_kind", "bad_words_token_ids", "think_token_ids")
if TYPE_CHECKING:
    _SamplingFields = msgspec.Struct
else:
    _SamplingFields = msgspec.defstruct(
        "_SamplingFields",
        [
            (field.name, field.type | None, None)
            for field in msgspec.structs.fields(SamplingParams)
            if field.name not in _IN_OPENAI + _IN_ANOTHER_FORM + _IN_PYTHON_ONLY
        ],
        kw_only=True,
        forbid_unknown_fields=True,
    )


class GenerationBody(_SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """Fields with the same meaning in chat completions and completions. The default of each is null.

    OpenAI's: those up to ``user``, and after it fields that have no effect on a self-hosted server and are ignored,
    except ``prompt_cache_key``, which is a ``session_id``.
    vLLM's: all other fields of ``SamplingParams``, and the next group; ``vllm_xargs`` are its ``extra_args``.
    Penstock's: ``band``, ``timeout_s``, ``session_id`` and ``resume``.
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
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

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

    @property
    def ignored(self) -> list[str]:
        """Paths of fields that are set and have no effect, though their callers might expect one."""
        is_set = self.stream_options is not None and self.stream_options.continuous_usage_stats
        return ["stream_options.continuous_usage_stats"] if is_set else []

    def sampling_params(self, **overrides: Any) -> SamplingParams:
        """Return the sampling parameters of the body, with ``overrides``; an override of None is ignored.

        Raises:
            ValidationError: a value is out of range; the message names the field.
        """
        values = {name: value for name in _PLAIN_FIELDS if (value := getattr(self, name)) not in (None, {})}
        values |= {name: value for name, value in overrides.items() if value is not None}
        if self.seed is not None:
            values["seed"] = self.seed & MAX_SEED  # OpenAI's seeds may be negative
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
        """Return the options of the requests other than prompt and sampling parameters."""
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
        """Return ``structured_outputs``, or the grammar of the older ``guided_*`` fields of vLLM."""
        guided = {name: value for name in _GUIDED if (value := getattr(self, f"guided_{name}")) is not None}
        if self.structured_outputs is None:
            return StructuredOutputsParams(**guided) if guided else None
        if guided:
            raise ValidationError(f"guided_{next(iter(guided))} and structured_outputs are the same; pass one of them")
        return StructuredOutputsParams(**msgspec.structs.asdict(self.structured_outputs))


class _HasOptions(Protocol):
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


def plain_options(body: _HasOptions) -> RequestOptions:
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


# Sampling parameters that a body has in another form, or that are options of the request.
_CONVERTED_FIELDS = {"seed", "repetition_detection", "structured_outputs", "truncate_prompt_tokens"}
# Fields that ``SamplingParams`` has under the same name and with the same meaning.
_PLAIN_FIELDS = tuple(
    name
    for name in GenerationBody.__struct_fields__
    if name in SamplingParams.__struct_fields__ and name not in _CONVERTED_FIELDS
)
_GUIDED = ("json", "regex", "choice", "grammar", "whitespace_pattern")
