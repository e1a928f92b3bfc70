"""Outputs at random of a schema's grammar, and whether jsonschema finds them valid."""

from __future__ import annotations

import json
import queue
import threading
import warnings
from collections.abc import Callable
from decimal import Decimal
from random import Random
from typing import Any

import jsonschema
import jsonschema_rs
import numpy as np
from jsonschema.validators import extend

from penstock.shared.errors import PenstockError
from penstock.shared.params.structured import StructuredOutputsParams
from penstock.worker.engine.structured.admission import COMPILE_TIMEOUT_S
from penstock.worker.engine.structured.constraint import GrammarConstraint, new_bitmask
from penstock.worker.engine.structured.grammar import Backend, CompiledGrammar
from penstock.worker.engine.structured.llguidance_backend import LlguidanceBackend
from penstock.worker.engine.structured.spec import spec_of
from penstock.worker.engine.structured.vocabulary import Vocabulary
from penstock.worker.engine.structured.xgrammar_backend import XgrammarBackend

PIECES = ('{"', '"a"', '"a":', '"b":', '":', '",', "}]", "]}", '"}', "1.0", "00", "0.0", "e1", "\\u0061", "\\u00", "ab")
TOKENS = [bytes([byte]) for byte in range(256)] + [piece.encode() for piece in PIECES]
EOS = len(TOKENS)
VOCABULARY = Vocabulary([*TOKENS, b""], [EOS])
MAX_TOKENS = 250
# After this many tokens only tokens that bring the end nearer are chosen, where possible.
HURRY_AFTER = 40
NUM_WALKS = 4
_CLOSING = [EOS, *(TOKENS.index(char.encode()) for char in '"}]')]
_PLAIN = np.array([(chr(token[0]).isalnum() and token[0] < 128) or len(token) > 1 for token in TOKENS] + [False])
_BLANK = np.array([token in (b" ", b"\n", b"\t", b"\r") for token in TOKENS] + [False])


def load(name: str) -> Backend:
    """A backend whose tokens are bytes and some longer pieces."""
    return XgrammarBackend(VOCABULARY) if name == "xgrammar" else LlguidanceBackend(VOCABULARY)


def compiled(backend: Backend, schema: Any, *, is_tight: bool = False) -> CompiledGrammar | None:
    """Return the grammar of ``schema``, tight without whitespace; None if it is refused or takes too long."""
    results: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def work() -> None:
        try:
            params = StructuredOutputsParams(json=schema, disable_any_whitespace=is_tight)
            results.put(backend.compile(spec_of(params)))
        except PenstockError:
            results.put(None)
        except BaseException as error:
            results.put(error)

    threading.Thread(target=work, daemon=True).start()
    try:
        result = results.get(timeout=COMPILE_TIMEOUT_S)
    except queue.Empty:
        return None
    if isinstance(result, BaseException):
        raise result
    return result


def fault_of(grammar: CompiledGrammar, schema: Any) -> str | None:
    """Return the fault in the outputs of ``schema``'s grammar; None without one."""
    judge = Judge(schema)
    if judge.objection is not None:
        return f"accepted, but is no schema: {judge.objection}"
    rng = Random(json.dumps(schema))
    for _ in range(NUM_WALKS):
        constraint = GrammarConstraint("", grammar.start(frozenset([EOS])), VOCABULARY.size, frozenset([EOS]))
        text, failure = walk(constraint, rng)
        if failure is not None:
            return f"after {text!r}: {failure}"
        if text is not None and (fault := judge.fault_of(text)) is not None:
            return f"{fault}: {text!r}"
    return None


def walk(constraint: GrammarConstraint, rng: Random) -> tuple[bytes | None, str | None]:
    """Return an output, None if it has no end within ``MAX_TOKENS``, and the reason if it could not continue."""
    output: list[int] = []
    bitmask = new_bitmask(1, VOCABULARY.size)
    style = rng.choice(("any", "plain", "hurry"))
    for count in range(MAX_TOKENS):
        if not constraint.fill(bitmask, 0):
            return _text(output), constraint.failure and constraint.failure.message
        allowed = np.unpackbits(bitmask[0].view(np.uint8), bitorder="little", count=VOCABULARY.size).astype(bool)
        token_id = _choose(allowed, rng, style if count < HURRY_AFTER else "hurry")
        if (error := constraint.accept(token_id)) is not None:
            return _text(output), error.message
        if constraint.is_terminated:
            return _text(output), None
        output.append(token_id)
    return None, None


def _choose(allowed: np.ndarray, rng: Random, style: str) -> int:
    if allowed[EOS] and rng.random() < 0.5:
        return EOS
    if style == "hurry":
        closing = [token_id for token_id in _CLOSING if allowed[token_id]]
        if closing and rng.random() < 0.9:
            return closing[0]
    for characters in (_PLAIN, ~_BLANK) if style != "any" or rng.random() < 0.7 else ():
        if (allowed & characters).any() and rng.random() < 0.8:
            allowed = allowed & characters
    return rng.choice(np.flatnonzero(allowed).tolist())


def _text(output: list[int]) -> bytes:
    return b"".join(VOCABULARY.tokens[token_id] for token_id in output)


def _is_integer(checker: Any, value: Any) -> bool:
    if isinstance(value, Decimal | float):
        return value % 1 == 0
    return isinstance(value, int) and not isinstance(value, bool)


_TYPES = jsonschema.Draft202012Validator.TYPE_CHECKER.redefine("integer", _is_integer)
_VALIDATOR: Any = extend(jsonschema.Draft202012Validator, type_checker=_TYPES)
FORMATS = jsonschema.FormatChecker([])
_UNKNOWN_TO_JSONSCHEMA = (
    "date",
    "time",
    "date-time",
    "duration",
    "email",
    "idn-email",
    "hostname",
    "idn-hostname",
    "ipv4",
    "ipv6",
    "uri",
    "uri-reference",
    "iri",
    "iri-reference",
    "uri-template",
    "uuid",
    "json-pointer",
    "relative-json-pointer",
    "regex",
)


def _add_format(name: str) -> None:
    validator = jsonschema_rs.validator_for({"type": "string", "format": name}, validate_formats=True)
    FORMATS.checks(name)(lambda value: not isinstance(value, str) or validator.is_valid(value))


for _name in _UNKNOWN_TO_JSONSCHEMA:
    _add_format(_name)


def _number(text: str) -> Decimal | float:
    try:
        return Decimal(text)
    except ArithmeticError:  # an exponent beyond all use
        return float(text)


class Judge:
    """jsonschema, with numbers as they are written, and every format of the standard as ``jsonschema_rs`` knows it."""

    def __init__(self, schema: Any) -> None:
        self.objection: str | None = None
        try:
            with warnings.catch_warnings(action="ignore"):  # of brackets in classes, which ``re`` reads as characters
                jsonschema.Draft202012Validator.check_schema(schema)
        except jsonschema.SchemaError as error:
            self.objection = error.message
        exact = json.loads(json.dumps(schema), parse_float=Decimal)
        # A constant may be spelled with other digits of the same double.
        self._readings = [
            (_VALIDATOR(exact, format_checker=FORMATS), _number),
            (_VALIDATOR(schema, format_checker=FORMATS), float),
        ]

    def fault_of(self, text: bytes) -> str | None:
        """Return why ``text`` violates the schema, both with exact numbers and with doubles; None if it is valid."""
        faults = [self._fault_of(text, *reading) for reading in self._readings]
        return None if None in faults else faults[0]

    def _fault_of(self, text: bytes, validator: Any, parse_float: Callable[[str], Any]) -> str | None:
        try:
            value = json.loads(text.decode(), parse_float=parse_float)
        except ValueError as error:
            return f"no JSON ({error})"
        try:
            with warnings.catch_warnings(action="ignore"):
                error = next(validator.iter_errors(value), None)
        except RecursionError:
            return "the schema refers to itself for ever"
        except Exception as failed:
            return f"the schema cannot be judged ({type(failed).__name__}: {failed})"
        return None if error is None else error.message[:200]
