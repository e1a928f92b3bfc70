"""Grammars of both libraries under the one interface, and its inputs: regexes, vocabularies, UTF-8."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers

from penstock.shared.errors import UnsupportedParameterError, ValidationError
from penstock.shared.params.structured import StructuredOutputsParams
from penstock.worker.engine.structured.charset import class_of, contains, parse_class
from penstock.worker.engine.structured.constraint import new_bitmask
from penstock.worker.engine.structured.grammar import Backend, Grammar
from penstock.worker.engine.structured.llguidance_backend import LlguidanceBackend
from penstock.worker.engine.structured.loader import load_backend
from penstock.worker.engine.structured.regex import normalize_regex
from penstock.worker.engine.structured.spec import spec_of
from penstock.worker.engine.structured.utf8 import Utf8Guard, without_wrong_pairs
from penstock.worker.engine.structured.vocabulary import Vocabulary
from penstock.worker.engine.structured.xgrammar_backend import XgrammarBackend

from .walking import EOS as BYTES_EOS
from .walking import load

MODEL = Path(__file__).parents[4] / "ops" / "demo" / "model"
NUM_TOKENS, VOCAB_SIZE, EOS = 382, 421, 2


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


@pytest.fixture(scope="module", params=["xgrammar", "llguidance"])
def backend(request: pytest.FixtureRequest) -> Backend:
    return load_backend(request.param, MODEL, VOCAB_SIZE, [EOS])


def id_of(tokenizer: Tokenizer, char: str) -> int:
    token_id = tokenizer.token_to_id(char)
    assert token_id is not None
    return token_id


def begin(backend: Backend, ending: frozenset[int] = frozenset([EOS]), **grammar: object) -> Grammar:
    return backend.compile(spec_of(StructuredOutputsParams(**grammar))).start(ending)  # type: ignore[arg-type]


def allowed(grammar: Grammar) -> set[int]:
    bitmask = new_bitmask(2, VOCAB_SIZE)
    grammar.fill_bitmask(bitmask, 1)
    assert (bitmask[0] == -1).all()
    return set(np.flatnonzero(np.unpackbits(bitmask[1].view(np.uint8), bitorder="little", count=VOCAB_SIZE)).tolist())


def test_it_goes_forward_and_back(backend: Backend, tokenizer: Tokenizer) -> None:
    grammar = begin(backend, regex="[0-9]{2,3}")
    one, two, letter = (id_of(tokenizer, char) for char in "12a")
    digits = {id_of(tokenizer, char) for char in "0123456789"}
    assert allowed(grammar) == digits
    assert grammar.validate_tokens([one, two, EOS, one]) == [one, two, EOS]
    assert grammar.validate_tokens([one, letter]) == [one]
    assert grammar.validate_tokens([EOS]) == []
    assert grammar.accept_tokens([one, two])
    assert allowed(grammar) == {*digits, EOS}
    assert grammar.accept_tokens([EOS])
    assert grammar.is_terminated()
    assert grammar.validate_tokens([one]) == []
    assert not grammar.accept_tokens([one])
    grammar.rollback(1)
    assert not grammar.is_terminated()
    assert allowed(grammar) == {*digits, EOS}
    grammar.rollback(1)
    assert allowed(grammar) == digits
    grammar.accept_tokens([one, two])
    assert allowed(grammar) == {EOS}
    grammar.reset()
    assert allowed(grammar) == digits
    assert not grammar.accept_tokens([letter])


def test_outputs_of_one_grammar_do_not_touch_each_other(backend: Backend, tokenizer: Tokenizer) -> None:
    compiled = backend.compile(spec_of(StructuredOutputsParams(regex="[0-9]{2}")))
    first, second = compiled.start(frozenset([EOS])), compiled.start(frozenset([EOS]))
    first.accept_tokens([id_of(tokenizer, "1")] * 2)
    assert allowed(first) == {EOS}
    assert EOS not in allowed(second)
    assert compiled.num_bytes > 0


def test_any_ending_token_ends_the_grammar_and_is_masked_elsewhere(backend: Backend, tokenizer: Tokenizer) -> None:
    letter = id_of(tokenizer, "a")
    grammar = begin(backend, frozenset([EOS, letter]), regex="[a-c]{2}")
    b = id_of(tokenizer, "b")
    assert letter not in allowed(grammar)
    assert grammar.accept_tokens([b, b])
    assert allowed(grammar) == {EOS, letter}
    assert grammar.validate_tokens([letter]) == [letter]
    assert grammar.accept_tokens([letter])
    assert grammar.is_terminated()


def test_special_tokens_and_padding_are_never_text(backend: Backend) -> None:
    ids = allowed(begin(backend, regex="[^x]*"))
    assert EOS in ids
    assert not ids & {0, 1}
    assert max(ids) < NUM_TOKENS


def test_a_spec_is_the_same_for_the_same_grammar() -> None:
    one = spec_of(StructuredOutputsParams(json={"type": "object", "properties": {"b": {}, "a": {}}}))
    assert one == spec_of(StructuredOutputsParams(json='{"type":"object","properties":{"b":{},"a":{}}}'))
    # The order of properties is that of the output.
    assert one != spec_of(StructuredOutputsParams(json='{"type":"object","properties":{"a":{},"b":{}}}'))
    assert one != spec_of(
        StructuredOutputsParams(json='{"type":"object","properties":{"b":{},"a":{}}}', disable_any_whitespace=True)
    )
    closed = spec_of(
        StructuredOutputsParams(
            json={"properties": {"a": {"properties": {}}}, "items": {"properties": {}, "additionalProperties": True}},
            disable_additional_properties=True,
        )
    )
    assert closed.text.count('"additionalProperties": false') == 2
    assert closed.text.count('"additionalProperties": true') == 1


def test_whitespace_follows_the_request(tokenizer: Tokenizer) -> None:
    xgrammar, llguidance = (load_backend(name, MODEL, VOCAB_SIZE, [EOS]) for name in ("xgrammar", "llguidance"))
    pattern = spec_of(
        StructuredOutputsParams(json={"type": "array", "items": {"const": 1}}, whitespace_pattern="[ ]{2}")
    )
    with pytest.raises(UnsupportedParameterError, match="llguidance"):
        xgrammar.compile(pattern)
    grammar = llguidance.compile(pattern).start(frozenset([EOS]))
    assert grammar.accept_tokens(tokenizer.encode("[  1  ]", add_special_tokens=False).ids)
    for backend, tight in ((xgrammar, "[1, 1]"), (llguidance, "[1,1]")):
        grammar = begin(backend, json={"type": "array", "items": {"const": 1}}, disable_any_whitespace=True)
        assert grammar.validate_tokens(ids := tokenizer.encode(tight, add_special_tokens=False).ids) == ids
        assert grammar.validate_tokens(tokenizer.encode("[ 1]", add_special_tokens=False).ids) != ids


@pytest.mark.parametrize(
    ("pattern", "normal"),
    [
        ("^a+$", "a+"),
        ("^a|b$", "a|b"),
        ("a.b", r"a[^\n]b"),
        (r"a\.\$\\.", r"a\.\$\\[^\n]"),
        ("[.$^]", r"[\u0024\u002e\u005e]"),
        ("[]a][^]a]", r"[\u005d\u0061]" + class_of(parse_class(r"[^\]a]"))),
        (r"[\]^](x)", r"[\u005d-\u005e](x)"),
    ],
)
def test_regexes_are_read_as_python_does(pattern: str, normal: str) -> None:
    assert normalize_regex(pattern, "regex") == normal
    for text in ("a", "aa", "b", "axb", "a\nb", "a.$\\q", ".", "$", "^", "]]", "ab", "]x", "^x"):
        assert bool(re.fullmatch(pattern, text)) == bool(re.fullmatch(normal, text)), text


# Texts on which every reading agrees: Python's, with and without re.ASCII, and JavaScript's.
CLASS_TABLE = [
    (r"\d", "7", "a\u0663\u00b2\uff17"),
    (r"\D", "a\u00e9", "7\u0663\uff17"),
    (r"\w", "aZ_7", "-\u00e9\u0663\u4e2d"),
    (r"\W", "- ", "aZ_7\u00e9\u0663\u4e2d"),
    (r"\s", " ", "a\u00a0\u2028\u3000\ufeff"),
    (r"\S", "a\u00e9", " \u00a0\u2028\u3000\ufeff"),
    (r"[\d]", "7", "a\u0663"),
    (r"[^\d]", "a\u00e9", "7\u0663"),
    (r"[\w.]", "a.", "-\u00e9"),
    (r"[^\w.]", "-", "a.\u00e9"),
    (r"[\s,]", " ,", "a\u00a0"),
    (r"[^\s,]", "a\u00e9", " ,\u00a0\u2028"),
    (r"[\W\d]", "-7", "a\u00e9\u0663"),
    (r"[^\W\d]", "a_", "-7\u00e9\u0663"),
    ("[a&&b]", "a&b", "c"),
    ("[a-c--b]", "ab-", "d"),
    ("[[a]", "[a", "]"),
]


@pytest.mark.parametrize(("pattern", "matched", "others"), CLASS_TABLE)
def test_a_class_means_the_same_with_both_libraries(pattern: str, matched: str, others: str) -> None:
    backend_names, cases = ("xgrammar", "llguidance"), [*((c, True) for c in matched), *((c, False) for c in others)]
    for name in backend_names:
        backend = load(name)
        free = backend.compile(spec_of(StructuredOutputsParams(regex=f"a{pattern}")))
        quoted = backend.compile(spec_of(StructuredOutputsParams(json={"type": "string", "pattern": f"^a{pattern}$"})))
        for char, is_matched in cases:
            for compiled, text in ((free, f"a{char}"), (quoted, f'"a{char}"')):
                ids = [*text.encode(), BYTES_EOS]
                fits = compiled.start(frozenset([BYTES_EOS])).validate_tokens(ids) == ids
                assert fits == is_matched, (name, text, pattern)


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("[z-a]", "bad character range"),
        (r"[a-\d]", "bad character range"),
        (r"[\q]", "escape that is not supported"),
        (r"[^\W\w]", "matches nothing"),
        ("[a", "unterminated"),
    ],
)
def test_a_class_that_means_nothing_is_refused(pattern: str, reason: str) -> None:
    with pytest.raises(ValidationError, match=rf"^regex: .* at position 1 .*{reason}"):
        normalize_regex(f"x{pattern}", "regex")


def test_a_unicode_property_within_a_class_is_only_for_llguidance() -> None:
    spec = spec_of(StructuredOutputsParams(regex=r"[\p{L}]"))
    with pytest.raises(UnsupportedParameterError, match="llguidance or auto"):
        load("xgrammar").compile(spec)
    ids = [*"\u00e9".encode(), BYTES_EOS]
    assert load("llguidance").compile(spec).start(frozenset([BYTES_EOS])).validate_tokens(ids) == ids


@pytest.mark.parametrize("pattern", ["a$b", "a^b", "(^a)", "(a$)b"])
def test_an_anchor_inside_is_refused(pattern: str) -> None:
    with pytest.raises(ValidationError, match=r"regex: .* inside the pattern"):
        normalize_regex(pattern, "regex")


@pytest.mark.parametrize(
    "text",
    [
        "[abc]",
        "[^abc]",
        "[a-c-]",
        "[-a]",
        r"[\d\w.-]",
        r"[^\W\d_]",
        r"[\x41-\u005a\n\]\\]",
        r"[+-\-]",
        r"[^\s]",
        "[!-~]",
    ],
)
def test_a_class_is_the_set_that_python_takes_it_for(text: str) -> None:
    ranges = parse_class(text)
    again = re.compile(class_of(ranges))
    for code in range(128):
        if text == r"[^\s]" and 0x1C <= code <= 0x1F:  # a space to Python's Unicode, none to its ASCII
            continue
        expected = bool(re.fullmatch(text, chr(code), re.ASCII))
        assert contains(ranges, chr(code)) == expected
        assert bool(again.fullmatch(chr(code))) == expected


def write(folder: Path, tokenizer: Tokenizer) -> Path:
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_a_sentence_piece_vocabulary(tmp_path: Path) -> None:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "a", "é"]
    tokenizer = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, [("▁", "a")], byte_fallback=True))
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    vocabulary = Vocabulary.load(write(tmp_path, tokenizer), len(pieces) + 5, [2])
    assert vocabulary.size == len(pieces) + 5
    assert vocabulary.tokens[:3] == [b""] * 3
    assert vocabulary.tokens[3 + 0xE9] == b"\xe9"
    assert vocabulary.tokens[-9:] == [b" ", b" a", b"a", "é".encode(), *[b""] * 5]


def test_a_vocabulary_of_words_is_refused(tmp_path: Path) -> None:
    words = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    with pytest.raises(UnsupportedParameterError, match="byte-level"):
        Vocabulary.load(write(tmp_path, words), 2, [])


def test_bytes_that_are_not_utf8_are_masked() -> None:
    tokens = [b"a", b"\xed", b"\xed\xa0", b"\xa0", b"\x9f", b"x\xf0", b"\x8f\x80", b"\x90", b"\xc3\xa9"]
    assert without_wrong_pairs(tokens) == [*tokens[:2], b"", *tokens[3:]]
    guard = Utf8Guard(Vocabulary(tokens, []))
    for last, forbidden in ((0, set()), (1, {3}), (5, {6}), (8, set())):
        bitmask = new_bitmask(1, len(tokens))
        guard.restrict(bitmask, 0, last)
        ids = np.flatnonzero(np.unpackbits(bitmask[0].view(np.uint8), bitorder="little", count=len(tokens)))
        # Bytes that continue no character are left to the grammar.
        assert set(range(len(tokens))) - set(ids.tolist()) == forbidden


@pytest.mark.parametrize("name", ["xgrammar", "llguidance"])
def test_forced_text_is_spelled_by_long_tokens(name: str) -> None:
    """A model was trained on them, and each token is a step."""
    pieces = [b"title", b"ti", b"ame", b"drama", b'":', b'{"']
    vocabulary = Vocabulary([*(bytes([byte]) for byte in range(256)), *pieces, b""], [256 + len(pieces)])
    backend = (XgrammarBackend if name == "xgrammar" else LlguidanceBackend)(vocabulary)
    schema = {"type": "object", "properties": {"title": {"enum": ["drama"]}}, "required": ["title"]}
    spec = spec_of(StructuredOutputsParams(json=schema, disable_any_whitespace=True))
    grammar = backend.compile(spec).start(frozenset(vocabulary.eos_token_ids))
    bitmask = new_bitmask(1, vocabulary.size)
    for token in (b'{"', b"title", b'":'):
        grammar.fill_bitmask(bitmask, 0)
        token_id = vocabulary.tokens.index(token)
        assert bitmask[0, token_id // 32] >> token_id % 32 & 1, token
        assert grammar.accept_tokens([token_id])
