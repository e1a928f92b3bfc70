"""Structured output by xgrammar: the default.

Where xgrammar would ignore a part of a JSON schema, ``schemas/xgrammar.py`` refuses the schema instead. Objects have
only their listed properties, as in vLLM, unless ``additionalProperties`` allows others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import xgrammar

from ....shared.errors import UnsupportedParameterError, ValidationError
from .grammar import Bitmask
from .regex import has_property_in_class
from .schemas.number_rules import limit_numbers
from .schemas.xgrammar import schema_for_xgrammar
from .spec import MAX_WHITESPACE, GrammarKind, GrammarSpec
from .spelling import Spelling
from .structural_tag import convert_schemas, legacy_tags
from .tool_input import with_tool_inputs
from .utf8 import Utf8Guard, without_wrong_pairs
from .vocabulary import Vocabulary

# "[12:34:56] /project/cpp/file.cc:12: Check failed: (condition) is false: reason"
_PLACE_IN_SOURCE = re.compile(r"\[[\d:]+\] \S+\.cc:\d+: (Check failed: .*? is false: )?")
_ESCAPED = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}


class XgrammarGrammar:
    """See ``grammar.Grammar``."""

    def __init__(self, matcher: xgrammar.GrammarMatcher, guard: Utf8Guard, spelling: Spelling) -> None:
        self._matcher = matcher
        self._guard = guard
        self._spelling = spelling
        self._token_ids: list[int] = []

    def accept_tokens(self, token_ids: Sequence[int]) -> bool:
        for token_id in token_ids:
            if self._matcher.is_terminated() or not self._matcher.accept_token(token_id):
                return False
            self._token_ids.append(token_id)
        return True

    def validate_tokens(self, token_ids: Sequence[int]) -> list[int]:
        accepted: list[int] = []
        for token_id in token_ids:
            if self._matcher.is_terminated() or not self._matcher.accept_token(token_id):
                break
            accepted.append(token_id)
        if accepted:
            self._matcher.rollback(len(accepted))
        return accepted

    def rollback(self, num_tokens: int) -> None:
        self._matcher.rollback(num_tokens)
        self._token_ids = self._token_ids[: len(self._token_ids) - num_tokens]

    def fill_bitmask(self, bitmask: Bitmask, row: int) -> None:
        self._matcher.fill_next_token_bitmask(bitmask, row)
        if self._token_ids:
            self._guard.restrict(bitmask, row, self._token_ids[-1])

    def forced_tokens(self, room: int) -> list[int]:
        return self._spelling.tokens_of(self._matcher.find_jump_forward_string().encode(), room)

    def is_terminated(self) -> bool:
        return self._matcher.is_terminated()

    def reset(self) -> None:
        self._matcher.reset()
        self._token_ids = []


class XgrammarCompiledGrammar:
    """See ``grammar.CompiledGrammar``."""

    def __init__(self, compiled: xgrammar.CompiledGrammar, guard: Utf8Guard, spelling: Spelling) -> None:
        self._compiled = compiled
        self._guard = guard
        self._spelling = spelling

    @property
    def num_bytes(self) -> int:
        return self._compiled.memory_size_bytes

    def start(self, ending_token_ids: frozenset[int]) -> XgrammarGrammar:
        matcher = xgrammar.GrammarMatcher(self._compiled, override_stop_tokens=sorted(ending_token_ids))
        return XgrammarGrammar(matcher, self._guard, self._spelling)


class XgrammarBackend:
    """See ``grammar.Backend``."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        info = xgrammar.TokenizerInfo(
            without_wrong_pairs(vocabulary.tokens),
            xgrammar.VocabType.RAW,
            vocab_size=vocabulary.size,
            stop_token_ids=vocabulary.eos_token_ids or None,
        )
        self._guard = Utf8Guard(vocabulary)
        self._spelling = Spelling(vocabulary)
        # One thread per compile leaves a core to the step loop. ``GrammarCache`` replaces the library's cache.
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, spec: GrammarSpec) -> XgrammarCompiledGrammar:
        if spec.whitespace_pattern is not None:
            raise UnsupportedParameterError(
                f"structured_outputs.whitespace_pattern={spec.whitespace_pattern!r} is not supported by xgrammar; the "
                f"engine would have to run with --structured-outputs-backend llguidance"
            )
        try:
            return XgrammarCompiledGrammar(self._compile(spec), self._guard, self._spelling)
        except ValidationError:
            raise
        except Exception as error:  # RuntimeError with the reason, or a class of the library
            reason = _PLACE_IN_SOURCE.sub("", str(error)).strip()
            raise ValidationError(f"{spec.field} is refused by xgrammar: {reason}") from error

    def _compile(self, spec: GrammarSpec) -> xgrammar.CompiledGrammar:
        if spec.kind is GrammarKind.JSON:
            schema = json.dumps(schema_for_xgrammar(json.loads(spec.text), spec.field))
            max_whitespace = MAX_WHITESPACE if spec.any_whitespace and spec.limits_lengths else None
            grammar = xgrammar.Grammar.from_json_schema(
                schema, any_whitespace=spec.any_whitespace, max_whitespace_cnt=max_whitespace
            )
            return self._compiler.compile_grammar(limit_numbers(str(grammar)) if spec.limits_lengths else grammar)
        if spec.kind is GrammarKind.REGEX:
            if has_property_in_class(spec.text):
                raise UnsupportedParameterError(
                    f"{spec.field}: \\p within a class is not supported by xgrammar; the engine would have to run with "
                    f"--structured-outputs-backend llguidance or auto"
                )
            return self._compiler.compile_regex(spec.text)
        if spec.kind is GrammarKind.CHOICE:
            alternatives = " | ".join(_quoted(choice) for choice in json.loads(spec.text))
            return self._compiler.compile_grammar(f"root ::= {alternatives}")
        if spec.kind is GrammarKind.GRAMMAR:
            if "::=" in spec.text:
                return self._compiler.compile_grammar(spec.text)
            return self._compiler.compile_lark(spec.text)
        tag = _structural_tag(spec)
        return self._compiler.compile_structural_tag(_with_limited_lengths(tag) if spec.limits_lengths else tag)


def _structural_tag(spec: GrammarSpec) -> dict[str, Any]:
    description = json.loads(spec.text)
    if "structures" not in description:
        return with_tool_inputs(convert_schemas(description, schema_for_xgrammar, spec.field), spec.field)
    tags = [
        xgrammar.StructuralTagItem(begin=begin, schema=json.dumps(schema_for_xgrammar(schema, spec.field)), end=end)
        for begin, schema, end in legacy_tags(description, spec.field)
    ]
    return xgrammar.StructuralTag.from_legacy_structural_tag(tags, description["triggers"]).model_dump()


def _with_limited_lengths(node: Any) -> Any:
    """Return a copy of a structural tag with each schema replaced by a grammar of limited lengths."""
    if isinstance(node, list):
        return [_with_limited_lengths(item) for item in node]
    if not isinstance(node, dict):
        return node
    if "json_schema" in node:
        if node.get("type") == "json_schema" and node.get("max_whitespace_cnt") is None:
            node = {**node, "max_whitespace_cnt": MAX_WHITESPACE}
        grammar = xgrammar.Grammar.from_structural_tag({"type": "structural_tag", "format": node})
        return {"type": "grammar", "grammar": limit_numbers(str(grammar))}
    return {key: _with_limited_lengths(value) for key, value in node.items()}


def _quoted(text: str) -> str:
    """Return ``text`` as a string literal of EBNF."""
    chars = (_ESCAPED.get(char) or (char if char.isprintable() else f"\\U{ord(char):08X}") for char in text)
    return f'"{"".join(chars)}"'
