"""A GGUF file's tokenizer cuts and joins text as the tokenizer does that it was made of."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import WordPiece

from penstock.worker.models.gguf.container import GgufFile
from penstock.worker.models.gguf.merges import derive_merges
from penstock.worker.models.gguf.tokenizer import GgufTokenizer

DEMO = Path(__file__).parents[3] / "ops" / "demo" / "model" / "tokenizer.json"
TEXTS = (
    "four hundred seven plus thirteen is",
    "12+34 = 46\n\n  and\tmore",
    "naïve 猫 \U0001f431 don't",
    "<s>a</s> b",
    "",
)
SPACE = "\u2581"


def tokenizer_of(**values: Any) -> GgufTokenizer:
    return GgufTokenizer(
        GgufFile(Path("x.gguf"), {f"tokenizer.ggml.{key}": value for key, value in values.items()}, {})
    )


def test_the_demo_tokenizer_survives_a_round_trip() -> None:
    source, original = json.loads(DEMO.read_text()), Tokenizer.from_file(str(DEMO))
    added = {each["id"]: each["content"] for each in source["added_tokens"]}
    names = {index: token for token, index in source["model"]["vocab"].items()} | added
    made = tokenizer_of(
        model="gpt2",
        pre="smollm",
        tokens=[names[index] for index in range(len(names))],
        token_type=[3 if index in added else 1 for index in range(len(names))],
        merges=[" ".join(merge) for merge in source["model"]["merges"]],
        bos_token_id=1,
        eos_token_id=2,
        add_bos_token=True,
    )
    for text in TEXTS:
        ids = original.encode(text).ids
        assert made.tokenizer.encode(text).ids == ids
        assert made.tokenizer.decode(ids) == original.decode(ids)
    assert made.config() | {"bos_token": "<s>", "eos_token": "</s>"} == made.config()
    assert made.end_token_ids() == [2]


@given(st.lists(st.tuples(st.text("ab\0\ud800\u00e9\U0001f600", max_size=5), st.integers(-3, 3))))
def test_merges_are_derived_from_all_cuts(vocabulary: list[tuple[str, int]]) -> None:
    tokens, scores = [token for token, _ in vocabulary], [float(score) for _, score in vocabulary]
    ids = {token: index for index, token in enumerate(tokens)}
    expected = []
    for index in sorted(range(len(tokens)), key=lambda index: -scores[index]):
        token = tokens[index]
        pairs = [(token[:at], token[at:]) for at in range(1, len(token))]
        merges = [pair for pair in pairs if ids.keys() >= set(pair)]
        expected += sorted(merges, key=lambda pair: ids[pair[0]])
    assert derive_merges(tokens, scores) == expected


def test_a_vocabulary_with_scores_merges_the_best_pair_first() -> None:
    """Merge the neighbours whose token has the best score, repeatedly, like sentencepiece."""
    rng = random.Random(0)
    pieces = sorted(
        {"".join(rng.choices(f"ab{SPACE}", k=rng.randrange(2, 5))) for _ in range(30)}, key=lambda _: rng.random()
    )
    singles = ["a", "b", SPACE]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *singles, *pieces]
    scores = [0.0] * 259 + [-1000.0] * 3 + [-float(rank) for rank in range(len(pieces))]
    types = [2, 3, 3] + [6] * 256 + [1] * (3 + len(pieces))
    ids = {"unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    made = tokenizer_of(model="llama", tokens=tokens, scores=scores, token_type=types, **ids)
    known = dict(zip(tokens, scores, strict=True))

    def merged(text: str) -> list[str]:
        parts = list(text)
        while True:
            pairs = [(known[a + b], -at) for at, (a, b) in enumerate(pairwise(parts)) if a + b in known]
            if not pairs:
                return parts
            at = -max(pairs)[1]
            parts[at : at + 2] = [parts[at] + parts[at + 1]]

    for _ in range(50):
        text = "".join(rng.choices("ab ", k=rng.randrange(1, 20)))
        found = made.tokenizer.encode(text)
        assert found.tokens == ["<s>", *merged(SPACE + text.replace(" ", SPACE))]
        assert made.tokenizer.decode(found.ids) == text
    accented = made.tokenizer.encode("é")
    assert accented.tokens[-2:] == ["<0xC3>", "<0xA9>"]
    assert made.tokenizer.decode(accented.ids) == "é"


@pytest.mark.parametrize(
    ("pre", "parts"),
    [
        ("llama-bpe", ["I", "'ll", " pay", " ", "123", "45", " €!!\n"]),
        ("qwen2", ["I", "'ll", " pay", " ", "1", "2", "3", "4", "5", " €!!\n"]),
        ("gpt-2", ["I", "'ll", " pay", " 12345", " €!!", "\n"]),
        ("tekken", ["I", "'ll", " pay", " ", "1", "2", "3", "4", "5", " €!!\n"]),
        ("gpt-4o", ["I'll", " pay", " ", "123", "45", " €!!\n"]),
        ("kimi-k2", ["I'll", " pay", " ", "123", "45", " €!!\n"]),
        ("deepseek-v3", ["I", "'ll", " pay", " ", "123", "45", " €!!\n"]),
        ("deepseek-llm", ["I", "'", "ll", " pay", " ", "12345", " ", "€", "!!", "\n"]),
        ("tiny_aya", ["I'll", " pay", " ", "12", "345", " €!!\n"]),
        ("superbpe", ["I'll pay ", "12", "345", " €!!\n"]),
        ("bloom", ["I'll", " pay", " 12345", " €", "!!\n"]),
        ("viking", ["I'll", " pay", " ", "1", "2", "3", "4", "5", " €", "!!\n"]),
        ("seed-coder", ["I", "'ll", " pay", " ", "1", "2", "3", "4", "5", " €!!", "\n"]),
        ("default", ["I", "'", "ll", " pay", " ", "123", "45", " €", "!!", "\n"]),
    ],
)
def test_how_a_vocabulary_cuts_text(pre: str, parts: list[str]) -> None:
    made = tokenizer_of(model="gpt2", pre=pre, tokens=["a"], token_type=[1], merges=[])
    text = "I'll pay 12345 €!!\n"
    cut = [(text[begin:end]) for _, (begin, end) in made.tokenizer.pre_tokenizer.pre_tokenize_str(text)]
    assert cut == parts


def test_a_vocabulary_of_words_and_their_continuations() -> None:
    """The file marks words; BERT's tokenizer in transformers' format marks continuations instead."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "hello", "##ing", "##s", "token", ",", "cafe", "!"]
    original = Tokenizer(WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    original.normalizer = normalizers.BertNormalizer()
    original.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    original.decoder = decoders.WordPiece()
    marked = [*words[:4], *(word[2:] if word.startswith("##") else SPACE + word for word in words[4:])]
    ids = {"unknown_token_id": 1, "bos_token_id": 2, "seperator_token_id": 3, "padding_token_id": 0}
    read = tokenizer_of(model="bert", tokens=marked, token_type=[3] * 4 + [1] * 7, **ids)
    for text in ("Hello, tokens!", "Café tokenings 猫"):
        encoded = read.tokenizer.encode(text)
        assert encoded.tokens == ["[CLS]", *original.encode(text).tokens, "[SEP]"]
        assert read.tokenizer.decode(encoded.ids) == original.decode(original.encode(text).ids).removesuffix(" [UNK]")
    assert "[UNK]" in encoded.tokens
    assert read.config()["sep_token"] == "[SEP]"


def test_a_vocabulary_with_probabilities_takes_the_likeliest_pieces() -> None:
    tokens = ["<pad>", "</s>", "<unk>", SPACE, f"{SPACE}a", "b", "c", f"{SPACE}ab", "bc", f"{SPACE}abc"]
    scores = [0.0, 0.0, 0.0, -2.0, -2.0, -3.0, -4.0, -6.0, -4.0, -20.0]
    ids = {"unknown_token_id": 2, "eos_token_id": 1}
    read = tokenizer_of(model="t5", tokens=tokens, scores=scores, token_type=[3, 3, 2] + [1] * 7, **ids)
    encoded = read.tokenizer.encode("abc ab")
    # The likeliest: -2 and -4 for the first word, -5 for the second.
    assert encoded.tokens == [f"{SPACE}a", "bc", f"{SPACE}a", "b", "</s>"]
    assert read.tokenizer.decode(encoded.ids) == "abc ab"


def test_a_file_may_ask_for_a_token_after_texts() -> None:
    values = {"model": "gpt2", "pre": "qwen2", "tokens": ["a", "<e>"], "token_type": [1, 3], "merges": []}
    assert tokenizer_of(**values, eos_token_id=1, add_eos_token=True).tokenizer.encode("aa").tokens == ["a", "a", "<e>"]
    assert tokenizer_of(**values, eos_token_id=1).tokenizer.encode("aa").tokens == ["a", "a"]


def test_end_of_turn_tokens_are_recognized_by_name_if_the_file_omits_them() -> None:
    tokens = ["<|endoftext|>", "<|im_end|>", "a", "</s>"]
    made = tokenizer_of(model="gpt2", pre="qwen2", tokens=tokens, token_type=[3, 3, 1, 1], merges=[], eos_token_id=1)
    assert made.end_token_ids() == [1, 0]
