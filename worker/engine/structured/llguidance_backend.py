"""Structured output by llguidance. ``schemas/llguidance.py`` converts JSON schemas for it, or refuses them.

Its tokenizer has the model's end-of-sequence tokens, which cannot change per request. So this module tracks the end of
an output: the mask allows a request's ending tokens where it allows the model's first end-of-sequence token, and the
library never receives an ending token.

llguidance has no option that limits the length of numbers in JSON. So an output has a second matcher, for any JSON
value whose numbers have a limited length, and the next token must be allowed by both.

Where the grammar leaves no choice of text, the library allows a single token: the first of its tokenizer's spelling. So
that tokenizer spells text as the model does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import llguidance
import llguidance.numpy
import numpy as np
from llguidance import LLMatcher, LLTokenizer, StructTag, TokenizerWrapper

from ....shared.errors import UnsupportedParameterError, ValidationError
from .grammar import Bitmask
from .schemas.document import Schema
from .schemas.llguidance import schema_for_llguidance
from .schemas.number_rules import MAX_EXPONENT_DIGITS, MAX_FRACTION_DIGITS, MAX_INTEGER_DIGITS
from .spec import MAX_WHITESPACE, GrammarKind, GrammarSpec
from .spelling import Spelling
from .structural_tag import legacy_tags
from .vocabulary import Vocabulary

# Measured: a schema of 1 kB uses about 100 kB once masks have been computed from it.
_BYTES_PER_CHARACTER = 100
_LEAST_BYTES = 1 << 16
_FRACTION = rf"(\.[0-9]{{1,{MAX_FRACTION_DIGITS}}})?"
_EXPONENT = rf"([eE][+-]?[0-9]{{1,{MAX_EXPONENT_DIGITS}}})?"
# Its strings allow more than JSON does, because the matcher of the schema forbids the rest.
_ANY_JSON = rf"""
start: value
value: object | array | STRING | NUMBER | "true" | "false" | "null"
object: "{{" (STRING ":" value ("," STRING ":" value)*)? "}}"
array: "[" (value ("," value)*)? "]"
STRING: /"([^"\\]|\\(.|\n))*"/
NUMBER: /-?(0|[1-9][0-9]{{0,{MAX_INTEGER_DIGITS - 1}}}){_FRACTION}{_EXPONENT}/
"""
_ANY_WHITESPACE = r"[ \t\r\n]+"
_SHORT_WHITESPACE = rf"[ \t\r\n]{{1,{MAX_WHITESPACE}}}"


class LlguidanceGrammar:
    """See ``grammar.Grammar``."""

    def __init__(
        self, matchers: list[LLMatcher], eos_token_id: int, ending_token_ids: frozenset[int], spelling: Spelling
    ) -> None:
        self._matchers = matchers
        self._matcher = matchers[0]
        self._spelling = spelling
        self._eos_token_id = eos_token_id
        self._ending_token_ids = ending_token_ids
        self._is_terminated = False

    def accept_tokens(self, token_ids: Sequence[int]) -> bool:
        return all(self._accept(token_id) for token_id in token_ids)

    def validate_tokens(self, token_ids: Sequence[int]) -> list[int]:
        if self._is_terminated:
            return []
        ending = next((i for i, t in enumerate(token_ids) if t in self._ending_token_ids), len(token_ids))
        num_fitting = self._num_fitting(token_ids[:ending])
        if num_fitting == ending < len(token_ids):
            ahead = self._matcher.deep_copy()
            if ahead.consume_tokens(list(token_ids[:ending])) and ahead.is_accepting():
                num_fitting += 1
        return list(token_ids[:num_fitting])

    def rollback(self, num_tokens: int) -> None:
        if num_tokens and self._is_terminated:
            self._is_terminated = False
            num_tokens -= 1
        for matcher in self._matchers if num_tokens else ():
            if not matcher.rollback(num_tokens):
                raise RuntimeError(_reason(matcher))

    def fill_bitmask(self, bitmask: Bitmask, row: int) -> None:
        _fill(self._matcher, bitmask, row)
        for matcher in self._matchers[1:]:
            limits = np.empty_like(bitmask[row : row + 1])
            _fill(matcher, limits, 0)
            bitmask[row] &= limits[0]
        words = bitmask[row].view(np.uint32)
        may_end = words[self._eos_token_id // 32] & _bit(self._eos_token_id)
        for token_id in self._ending_token_ids:
            if may_end:
                words[token_id // 32] |= _bit(token_id)
            else:
                words[token_id // 32] &= ~_bit(token_id)

    def forced_tokens(self, room: int) -> list[int]:
        # Not by compute_ff_tokens, which leaves out tokens that could be longer in another text.
        token_ids = self._spelling.tokens_of(self._matcher.compute_ff_bytes(), room)
        return token_ids[: self._num_fitting(token_ids)] if len(self._matchers) > 1 else token_ids

    def is_terminated(self) -> bool:
        return self._is_terminated

    def reset(self) -> None:
        self._is_terminated = False
        for matcher in self._matchers:
            matcher.reset()

    def _num_fitting(self, token_ids: Sequence[int]) -> int:
        return min(matcher.validate_tokens(list(token_ids)) for matcher in self._matchers)

    def _accept(self, token_id: int) -> bool:
        if self._is_terminated:
            return False
        if token_id in self._ending_token_ids:
            self._is_terminated = self._matcher.is_accepting()
            return self._is_terminated
        # Validate first, because the library accepts a wrong token and reports it with the next mask only.
        return self._num_fitting([token_id]) == 1 and all(matcher.consume_token(token_id) for matcher in self._matchers)


class LlguidanceCompiledGrammar:
    """See ``grammar.CompiledGrammar``."""

    def __init__(self, matchers: list[LLMatcher], eos_token_id: int, num_characters: int, spelling: Spelling) -> None:
        self._matchers = matchers
        self._spelling = spelling
        self._eos_token_id = eos_token_id
        self.num_bytes = _LEAST_BYTES + _BYTES_PER_CHARACTER * num_characters

    def start(self, ending_token_ids: frozenset[int]) -> LlguidanceGrammar:
        matchers = [matcher.deep_copy() for matcher in self._matchers]
        return LlguidanceGrammar(matchers, self._eos_token_id, ending_token_ids, self._spelling)


class LlguidanceBackend:
    """See ``grammar.Backend``."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        if not vocabulary.eos_token_ids:
            raise UnsupportedParameterError(
                "structured_outputs: llguidance needs a model with an end-of-sequence token"
            )
        self._eos_token_id = vocabulary.eos_token_ids[0]
        self._spelling = Spelling(vocabulary)
        self._tokenizer = LLTokenizer(
            TokenizerWrapper(_Tokenizer(vocabulary, self._spelling)),
            n_vocab=vocabulary.size,
            eos_token=vocabulary.eos_token_ids,
        )

    def compile(self, spec: GrammarSpec) -> LlguidanceCompiledGrammar:
        try:
            grammars = [_grammar(spec), *_limits(spec)]
        except ValidationError:
            raise
        except Exception as error:  # ValueError, or any exception of the conversion from EBNF
            raise ValidationError(f"{spec.field} is refused by llguidance: {error}") from error
        matchers = [LLMatcher(self._tokenizer, grammar, log_level=0) for grammar in grammars]
        for matcher in matchers:
            if matcher.is_error():
                raise ValidationError(f"{spec.field} is refused by llguidance: {_reason(matcher)}")
        return LlguidanceCompiledGrammar(matchers, self._eos_token_id, len(spec.text), self._spelling)


def _fill(matcher: LLMatcher, bitmask: Bitmask, row: int) -> None:
    llguidance.numpy.fill_next_token_bitmask(matcher, bitmask, row)
    if matcher.is_error():
        if not _reason(matcher).startswith("NoExtension"):
            raise RuntimeError(_reason(matcher))
        bitmask[row] = 0  # the grammar allows no further token


def _reason(matcher: LLMatcher) -> str:
    """Return the reason why the matcher stopped, without the parser's state that follows it."""
    return matcher.get_error().splitlines()[0]


def _bit(token_id: int) -> np.uint32:
    """Return the bit of a token within its word of a mask."""
    return np.uint32(1 << token_id % 32)


def _grammar(spec: GrammarSpec) -> str:
    if spec.kind is GrammarKind.JSON:
        options: Any = {"whitespace_flexible": spec.any_whitespace}
        if spec.whitespace_pattern is not None:
            options["whitespace_pattern"] = spec.whitespace_pattern
        elif spec.any_whitespace and spec.limits_lengths:
            options["whitespace_pattern"] = _SHORT_WHITESPACE
        schema = schema_for_llguidance(json.loads(spec.text), spec.field)
        return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)
    if spec.kind is GrammarKind.REGEX:
        return LLMatcher.grammar_from_regex(spec.text)
    if spec.kind is GrammarKind.STRUCTURAL_TAG:
        return _structural_tag(spec)
    return llguidance.grammar_from("choice" if spec.kind is GrammarKind.CHOICE else "grammar", spec.text)


def _limits(spec: GrammarSpec) -> list[str]:
    """Return the grammar that limits numbers, as a list; an empty list if the output is not JSON or has no limit."""
    if not spec.limits_lengths:
        return []
    if spec.kind is GrammarKind.STRUCTURAL_TAG:
        return [_structural_tag(spec, are_limits=True)]
    return [_any_json(spec.whitespace_pattern or (_ANY_WHITESPACE if spec.any_whitespace else None))]


def _any_json(whitespace: str | None) -> str:
    if whitespace is None:
        return _ANY_JSON
    escaped = re.sub(r"\\.|/|\n", lambda part: {"/": "\\/", "\n": "\\n"}.get(part[0], part[0]), whitespace)
    return f"{_ANY_JSON}%ignore /{escaped}/\n"


def _structural_tag(spec: GrammarSpec, *, are_limits: bool = False) -> str:
    """Return the grammar of a structural tag.

    Args:
        are_limits: whether each tag contains any JSON with numbers of limited length, instead of its schema.
    """
    description = json.loads(spec.text)
    if "structures" not in description:
        raise UnsupportedParameterError(
            f"{spec.field}: llguidance knows the form with structures and triggers only; the engine would have to run "
            f"with --structured-outputs-backend xgrammar"
        )
    tags = [
        StructTag(
            trigger=next(trigger for trigger in description["triggers"] if begin.startswith(trigger)),
            begin=begin,
            grammar=_any_json(_ANY_WHITESPACE) if are_limits else _schema_of_tag(schema, spec),
            end=end,
        )
        for begin, schema, end in legacy_tags(description, spec.field)
    ]
    return StructTag.to_grammar(tags, assume_special=False)


def _schema_of_tag(schema: Any, spec: GrammarSpec) -> Schema:
    converted = schema_for_llguidance(schema, spec.field)
    if not spec.limits_lengths:
        return converted
    return {**converted, "x-guidance": {**converted["x-guidance"], "whitespace_pattern": _SHORT_WHITESPACE}}


class _Tokenizer:
    """The tokenizer that ``TokenizerWrapper`` requires."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, spelling: Spelling) -> None:
        self.eos_token_id = vocabulary.eos_token_ids[0]
        self.tokens = vocabulary.tokens
        self.special_token_ids = [token_id for token_id, token in enumerate(vocabulary.tokens) if not token]
        self._spelling = spelling

    def __call__(self, text: bytes | str) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        return self._spelling.tokens_of(data, len(data))
