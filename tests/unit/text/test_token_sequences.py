"""Words that an output shall not hold and marks around thinking, in the tokens of different tokenizers."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from penstock.shared.errors import UnsupportedParameterError, ValidationError
from penstock.shared.params.sampling import SamplingParams
from penstock.shared.params.structured import StructuredOutputsParams
from penstock.worker.text.chat_template import ChatTemplate
from penstock.worker.text.tokenizer import TextCodec
from penstock.worker.text.vocabulary import bad_word_sequences, find_think_token_ids

from .test_detokenizer import byte_level


@functools.cache
def merging() -> Tokenizer:
    """Byte-level with words that are one token after a space and two at the beginning of a text."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "lo", "Ġlo", "Hel", "Hello", "ĠHel", "ĠHello"]
    tokens += ["He", "ĠH", "ĠHe"]
    merges = [("l", "o"), ("Ġ", "H"), ("H", "e"), ("ĠH", "e"), ("ĠHe", "l"), ("ĠHel", "lo"), ("He", "l")]
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


def sequences(tokenizer: Tokenizer, *words: str) -> list[list[str]]:
    tokens = {token_id: token for token, token_id in tokenizer.get_vocab().items()}
    return [[tokens[token_id] for token_id in sequence] for sequence in bad_word_sequences(tokenizer, words)]


def test_a_word_is_forbidden_with_and_without_a_space_before_it() -> None:
    assert sequences(merging(), "Hello") == [["Hel", "lo"], ["ĠHello"]]
    assert sequences(merging(), " Hello", "Hello") == [["Hel", "lo"], ["ĠHello"]]


def test_a_forbidden_token_is_listed_once() -> None:
    assert sequences(merging(), "x") == [["x"]]
    assert sequences(merging(), "x", "x", "lo") == [["x"], ["lo"]]


def test_white_space_is_a_word_too() -> None:
    assert sequences(merging(), "\n") == [["Ċ"]]
    assert sequences(merging(), " ") == [["Ġ"]]


def test_a_tokenizer_that_puts_a_space_before_every_text_has_one_form() -> None:
    tokenizer = Tokenizer(models.WordLevel({"▁cat": 0, "cat": 1, "<unk>": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    assert sequences(tokenizer, "cat") == [["▁cat"]]


def test_special_tokens_around_a_text_are_no_part_of_a_word(demo_model: Path) -> None:
    codec = TextCodec.load(demo_model)
    completed = codec.complete(SamplingParams(bad_words=["six"]))
    assert completed.bad_words_token_ids is not None
    assert codec.encode("six")[0] not in {token_id for ids in completed.bad_words_token_ids for token_id in ids}


def test_a_word_of_which_nothing_is_left_is_refused() -> None:
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    tokenizer.normalizer = normalizers.Replace("~", "")
    with pytest.raises(ValidationError, match="bad_words contains '~', for which this model's tokenizer has no tokens"):
        bad_word_sequences(tokenizer, ["a", "~"])


@pytest.mark.parametrize(
    ("added", "expected"),
    [
        (["<think>", "</think>"], ("<think>", "</think>")),
        (["[THINK]", "[/THINK]"], ("[THINK]", "[/THINK]")),
        (["<think>"], None),
        ([], None),
    ],
)
def test_marks_around_thinking(added: list[str], expected: tuple[str, str] | None) -> None:
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    tokenizer.add_tokens(added)
    token_ids = find_think_token_ids(tokenizer)
    assert (None if token_ids is None else tuple(map(tokenizer.id_to_token, token_ids))) == expected


def test_parameters_are_completed_for_an_engine_without_tokenizer(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    plain = TextCodec(tokenizer, None)
    params = SamplingParams(temperature=0.5)
    assert plain.complete(params) is params
    with pytest.raises(UnsupportedParameterError, match=r"thinking_token_budget=9 needs a model .* leave it at None"):
        plain.complete(SamplingParams(thinking_token_budget=9))
    assert plain.complete(SamplingParams(thinking_token_budget=-1)).think_token_ids is None
    tokenizer.add_tokens(["<think>", "</think>"])
    (tmp_path / "tokenizer.json").write_text(json.dumps(json.loads(tokenizer.to_str())))
    thinking = TextCodec.load(tmp_path)
    completed = thinking.complete(SamplingParams(thinking_token_budget=9, bad_words=["the"]))
    assert completed.think_token_ids == (tokenizer.token_to_id("<think>"), tokenizer.token_to_id("</think>"))
    assert completed.bad_words_token_ids == bad_word_sequences(tokenizer, ["the"])


def test_a_grammar_can_wait_for_marks_that_are_tokens() -> None:
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    waiting = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a", enable_in_reasoning=False))
    named = TextCodec(tokenizer, None, reasoning_parser="qwen3")
    assert (named.chat_style.reasoning_parser, named.can_think_first) == ("qwen3", False)
    with pytest.raises(UnsupportedParameterError, match="enable_in_reasoning=False needs a model whose vocabulary"):
        named.complete(waiting)
    tokenizer.add_tokens(["[THINK]", "[/THINK]", "<think>", "</think>"])
    template = ChatTemplate("{{ '<think></think>' }}", {})
    on, off = TextCodec(tokenizer, template), TextCodec(tokenizer, template, reasoning_parser="none")
    chosen = TextCodec(tokenizer, template, reasoning_parser="mistral")
    assert [codec.can_think_first for codec in (on, off, chosen)] == [True, False, True]
    assert [codec.chat_style.reasoning_parser for codec in (on, off, chosen)] == ["qwen3", "", "mistral"]
    start, end = (tokenizer.token_to_id(mark) or 0 for mark in ("[THINK]", "[/THINK]"))
    assert chosen.complete(waiting).think_token_ids == (start, end)
    assert [chosen.has_begun_thinking(ids) for ids in ([start, 5], [start, end], [5])] == [True, False, False]
