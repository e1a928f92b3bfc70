"""The deltas joined equal the tokenizer's decode of the whole."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from penstock.worker.text.detokenizer import NO_CONTEXT, DecodeContext, IncrementalDetokenizer
from penstock.worker.text.vocabulary import TokenBytes, TokenKinds

CORPUS = ["the quick brown fox", "déjà vu", "日本語のテキスト", "emoji 👩‍👩‍👧 🙂", "a  b   c"] * 4


@functools.cache
def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


@functools.cache
def sentencepiece_like() -> Tokenizer:
    """Metaspace with byte fallback, as Llama 2 has it."""
    bytes_ = [f"<0x{value:02X}>" for value in range(256)]
    words = ["▁", "t", "h", "e", "▁t", "▁the", "q", "u", "▁qu", "é", "a", "▁a"]
    vocabulary = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", *bytes_, *words])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


@functools.cache
def sentencepiece_without_fuse() -> Tokenizer:
    """Tokenizer of some conversions: nothing joins the pieces, and no space is stripped from the beginning."""
    tokenizer = Tokenizer.from_str(sentencepiece_like().to_str())
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()])
    return tokenizer


@functools.cache
def metaspace() -> Tokenizer:
    """A unigram model, as T5 has it; the first space is stripped."""
    words = ["<unk>", "▁", "▁the", "qu", "ick", "▁a", "é", "日", "▁▁", ".", "▁."]
    tokenizer = Tokenizer(models.Unigram([(word, -1.0) for word in words], 0, False))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


@functools.cache
def wordpiece(cleanup: bool = True) -> Tokenizer:
    """Tokenizer as of BERT: spaces between words, but not before punctuation."""
    words = ["[UNK]", "the", "qu", "##ick", "##s", ".", ",", "'", "n't", "'s", "a", "##é", "日", "?", "do", "not", "##"]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.add_special_tokens(["[CLS]", "[SEP]"])
    tokenizer.add_tokens(["[new]"])
    tokenizer.decoder = decoders.WordPiece(cleanup=cleanup)
    return tokenizer


def wordpiece_as_it_is() -> Tokenizer:
    return wordpiece(cleanup=False)


@functools.cache
def word_level() -> Tokenizer:
    """No decoder at all: a space between any two tokens."""
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(9)}, unk_token="w0"))
    tokenizer.add_special_tokens(["[CLS]", "[SEP]"])
    return tokenizer


@functools.cache
def suffixed() -> Tokenizer:
    """The first BPE models: a mark ends each word."""
    words = ["a</w>", "b", "c</w>", "é", "日</w>"]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer.decoder = decoders.BPEDecoder()
    return tokenizer


MAKERS = [
    byte_level,
    sentencepiece_like,
    sentencepiece_without_fuse,
    metaspace,
    wordpiece,
    wordpiece_as_it_is,
    word_level,
    suffixed,
]


Maker = Callable[[], Tokenizer]


@functools.cache
def kinds_of(make: Maker) -> TokenKinds:
    return TokenKinds.from_tokenizer(make())


@functools.cache
def ids_of(make: Maker, without: frozenset[str]) -> st.SearchStrategy[int]:
    return st.sampled_from([i for token, i in sorted(make().get_vocab().items()) if token not in without])


def draw_token_ids(make: Maker, data: st.DataObject, without: frozenset[str] = frozenset()) -> list[int]:
    """Any ids, or some of a few: bytes that never become a character, special tokens next to each other."""
    ids = ids_of(make, without)
    few = data.draw(st.lists(ids, max_size=4))
    return data.draw(st.lists(st.sampled_from(few) if few else ids, max_size=40))


# To draw tokens takes longer than to read them, so those of an example are read in both ways.
@pytest.mark.parametrize("make", MAKERS)
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_deltas_joined_equal_the_decode_of_the_whole(make, data: st.DataObject) -> None:
    tokenizer = make()
    kinds = kinds_of(make)
    token_ids = draw_token_ids(make, data)
    num_together = data.draw(st.integers(1, 4))
    for skip in (True, False):
        detokenizer = IncrementalDetokenizer(tokenizer, kinds, skip_special_tokens=skip)
        pieces = [detokenizer.add(token_ids[i : i + num_together]) for i in range(0, len(token_ids), num_together)]
        text = "".join(pieces) + detokenizer.flush()
        assert text == tokenizer.decode(token_ids, skip_special_tokens=skip)


def detokenizer_after(tokenizer: Tokenizer, prompt: list[int], *, skip: bool) -> IncrementalDetokenizer:
    kinds = TokenKinds.from_tokenizer(tokenizer)
    skipped_ids: frozenset[int] = kinds.special_ids if skip else frozenset()
    token_bytes = TokenBytes(tokenizer, kinds)
    context = DecodeContext.of_prompt(prompt, tokenizer, kinds, token_bytes, skipped_ids=skipped_ids)
    return IncrementalDetokenizer(tokenizer, kinds, context, skip_special_tokens=skip)


def text_after(tokenizer: Tokenizer, prompt: list[int], output: list[int], *, skip: bool, step: int = 1) -> str:
    detokenizer = detokenizer_after(tokenizer, prompt, skip=skip)
    pieces = [detokenizer.add(output[i : i + step]) for i in range(0, len(output), step)]
    return "".join(pieces) + detokenizer.flush()


def bytes_at_seam(kinds: TokenKinds, prompt: list[int], output: list[int]) -> bool:
    """Whether byte tokens are on both sides, so that a decoder reads them as one run."""
    return bool(prompt and output) and {prompt[-1], output[0]} <= kinds.byte_ids


@pytest.mark.parametrize("make", MAKERS)
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_joined_deltas_equal_the_text_added_to_the_decoded_prompt(make, data: st.DataObject) -> None:
    tokenizer, kinds = make(), kinds_of(make)
    token_ids = draw_token_ids(make, data)
    cut, num_together = data.draw(st.integers(0, len(token_ids))), data.draw(st.integers(1, 4))
    for skip in (True, False):
        visible = [token_id for token_id in token_ids if not skip or token_id not in kinds.special_ids]
        at = min(cut, len(visible))
        prompt, output = visible[:at], visible[at:]
        whole, before = (tokenizer.decode(ids, skip_special_tokens=False) for ids in (visible, prompt))
        text = text_after(tokenizer, token_ids[:cut] if not skip else prompt, output, skip=skip, step=num_together)
        if bytes_at_seam(kinds, prompt, output) and "\ufffd" in whole:
            continue  # an invalid byte of the output changes the text of the prompt
        if prompt and kinds.byte_ids.issuperset(prompt):
            continue  # a context holds no run of byte tokens, so such a prompt has none; a tokenizer adds <s> to it
        if whole.startswith(before):
            assert text == whole[len(before) :]
        else:  # the prompt ends within a character, which is the output's
            while prompt and prompt[-1] in kinds.byte_ids and before.endswith("\ufffd"):
                prompt = prompt[:-1]
                before = tokenizer.decode(prompt, skip_special_tokens=False)
            assert whole.endswith(text)
            kept_by_prompt = whole[: len(whole) - len(text)]
            assert before.startswith(kept_by_prompt)
            assert set(before[len(kept_by_prompt) :]) <= {"\ufffd"}


def test_a_whole_character_before_a_split_one_is_the_prompts() -> None:
    """A decoder replaces every byte of a run that ends within a character, also those of the characters before it."""
    tokenizer = sentencepiece_like()
    vocabulary = tokenizer.get_vocab()
    token_ids = [vocabulary[f"<0x{value:02X}>"] for value in "\0\x80".encode()]
    assert text_after(tokenizer, token_ids[:2], token_ids[2:], skip=False) == "\x80"


BYTES_AND_WORDS = "<s> ▁the ▁a <0xE6> <0x97> <0xA5> </s> ▁ ▁qu é <0xC3> <0xA9>"


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize(
    ("make", "tokens"),
    [
        (sentencepiece_like, BYTES_AND_WORDS),
        (sentencepiece_without_fuse, BYTES_AND_WORDS),
        (metaspace, "<s> ▁the ▁a ▁ qu ick </s> ▁."),
        (wordpiece, "[CLS] the qu ##ick , [new] do not . [SEP] a"),
        (word_level, "[CLS] w1 w2 [SEP] w3"),
        (byte_level, None),
    ],
)
def test_wherever_a_text_is_cut_both_parts_joined_are_the_whole(make: Maker, tokens: str | None, skip: bool) -> None:
    tokenizer = make()
    if tokens is None:
        token_ids = [0, *tokenizer.encode("the quick é日本 👩‍👩‍👧 fox").ids]
    else:
        token_ids = [tokenizer.get_vocab()[token] for token in tokens.split(" ")]
    whole = tokenizer.decode(token_ids, skip_special_tokens=skip)
    for cut in range(len(token_ids) + 1):
        before = tokenizer.decode(token_ids[:cut], skip_special_tokens=skip)
        text = text_after(tokenizer, token_ids[:cut], token_ids[cut:], skip=skip)
        assert (before if whole.startswith(before) else before.rstrip("\ufffd")) + text == whole


@pytest.mark.slow
def test_a_cut_answer_equals_transformers_decode() -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = sentencepiece_like()
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    words = [tokenizer.get_vocab()[token] for token in ("▁the", "t", "h", "▁a", "▁", "▁qu", "<0xC3>", "<0xA9>", "</s>")]
    draw = random.Random(1)
    for _ in range(200):
        token_ids = [1, *draw.choices(words[:6], k=draw.randrange(1, 5)), *draw.choices(words, k=12)]
        cut = draw.randrange(2, 6)
        whole, before = (theirs.decode(ids, skip_special_tokens=True) for ids in (token_ids, token_ids[:cut]))
        text = text_after(tokenizer, token_ids[:cut], token_ids[cut:], skip=True)
        # An invalid byte changes the text before it, too.
        assert "\ufffd" in whole or before.rstrip("\ufffd") + text == whole


def test_the_space_after_a_prompt_stays() -> None:
    tokenizer = sentencepiece_like()
    the, a = (tokenizer.get_vocab()[token] for token in ("▁the", "▁a"))
    assert text_after(tokenizer, [1, the], [a, the], skip=True) == " a the"
    # Special tokens that are skipped are no text, so the first word is that of the whole.
    assert text_after(tokenizer, [1], [a, the], skip=True) == "a the"
    assert text_after(tokenizer, [1, the, 2, 1], [a, the], skip=True) == " a the"
    assert text_after(tokenizer, [], [a, the], skip=True) == "a the"


def test_the_end_of_a_long_prompt_costs_little() -> None:
    tokenizer = byte_level()
    prompt = tokenizer.encode("the quick brown fox " * 5_000).ids
    kinds = TokenKinds.from_tokenizer(tokenizer)
    context = DecodeContext.of_prompt(prompt, tokenizer, kinds, TokenBytes(tokenizer, kinds), skipped_ids=frozenset())
    assert len(context.token_ids) == 1


@pytest.mark.slow
@pytest.mark.parametrize("make", MAKERS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_without_spaces_special_tokens_that_follow_each_other_are_joined(make, data: st.DataObject) -> None:
    tokenizer = make()
    kinds = kinds_of(make)
    # Without tokens that are a space or nothing: they cannot be seen between two marks.
    token_ids = draw_token_ids(make, data, without=frozenset({"▁", "▁▁", "Ġ", "ĠĠ", "ĠĠĠ", "<0x20>", "##"}))
    marks = "|".join(re.escape(mark) for mark in kinds.added.values()) or "(?!)"
    for skip in (True, False):
        detokenizer = IncrementalDetokenizer(
            tokenizer, kinds, skip_special_tokens=skip, spaces_between_special_tokens=False
        )
        text = "".join(detokenizer.add([token_id]) for token_id in token_ids) + detokenizer.flush()
        expected = tokenizer.decode(token_ids, skip_special_tokens=skip)
        if not skip:
            expected = re.sub(f"({marks}) (?={marks})", r"\1", expected)
        assert text == expected


def test_spaces_between_special_tokens() -> None:
    tokenizer = wordpiece()
    vocabulary = tokenizer.get_vocab()
    token_ids = [vocabulary[token] for token in ("the", "[CLS]", "[SEP]", "[new]", "qu", "##ick")]

    def text(**options: bool) -> str:
        options = {"skip_special_tokens": False, **options}
        detokenizer = IncrementalDetokenizer(tokenizer, TokenKinds.from_tokenizer(tokenizer), NO_CONTEXT, **options)
        return detokenizer.add(token_ids) + detokenizer.flush()

    assert text() == "the [CLS] [SEP] [new] quick"
    assert text(spaces_between_special_tokens=False) == "the [CLS][SEP][new] quick"
    assert text(spaces_between_special_tokens=False, skip_special_tokens=True) == "the [new] quick"


@pytest.mark.parametrize("text", ["déjà vu", "日本語のテキスト", "👩‍👩‍👧 🙂"])
def test_no_incomplete_character_is_shown(text: str) -> None:
    detokenizer = IncrementalDetokenizer(
        byte_level(), TokenKinds.from_tokenizer(byte_level()), skip_special_tokens=True
    )
    pieces = [detokenizer.add([token_id]) for token_id in byte_level().encode(text).ids]
    assert all("\ufffd" not in piece for piece in pieces)
    assert "".join(pieces) + detokenizer.flush() == text


def test_a_skipped_special_token_does_not_part_the_bytes_around_it() -> None:
    tokenizer = sentencepiece_like()
    detokenizer = IncrementalDetokenizer(tokenizer, TokenKinds.from_tokenizer(tokenizer), skip_special_tokens=True)
    token_ids = [3, 1, 131, 1, 0]
    text = "".join(detokenizer.add([token_id]) for token_id in token_ids) + detokenizer.flush()
    assert text == tokenizer.decode(token_ids, skip_special_tokens=True)
