"""Texts that are cut keep the tokens that the model expects around them, as transformers cuts them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from penstock.shared.errors import ValidationError
from penstock.shared.params.prompts import Cut
from penstock.worker.text.chat_template import ChatTemplate
from penstock.worker.text.tokenizer import TextCodec

WORDS = {"[CLS]": 0, "[SEP]": 1, **{letter: number for number, letter in enumerate("abcdefgh", start=2)}}


def tokenizer() -> Tokenizer:
    word_level = Tokenizer(models.WordLevel(WORDS, unk_token="[SEP]"))
    word_level.pre_tokenizer = pre_tokenizers.Whitespace()
    word_level.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 0), ("[SEP]", 1)]
    )
    return word_level


CODEC = TextCodec(tokenizer(), ChatTemplate("{{ messages[0].content }}", {}))
words = st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=12).map(" ".join)


@given(words, st.integers(3, 20), st.sampled_from(["left", "right"]))
def test_a_text_is_cut_as_the_library_cuts_it(text: str, num_tokens: int, side: str) -> None:
    reference = tokenizer()
    reference.enable_truncation(num_tokens, direction=side)
    assert CODEC.encode(text, cut=Cut(num_tokens, side)) == reference.encode(text).ids
    bare = reference.encode(text, add_special_tokens=False).ids
    assert CODEC.encode(text, cut=Cut(num_tokens, side), add_special_tokens=False) == bare
    messages = [{"role": "user", "content": text}]
    rendered = CODEC.render_chat(messages, None)
    assert CODEC.encode(rendered, add_special_tokens=False, cut=Cut(num_tokens, side)) == bare
    assert CODEC.encode(text) == tokenizer().encode(text).ids, "nothing is left of the cut"


@given(words, words, st.integers(5, 24), st.sampled_from(["left", "right"]))
def test_of_a_pair_the_longer_text_is_cut_until_both_fit(text: str, other: str, num_tokens: int, side: str) -> None:
    ids, second_at = CODEC.encode_pair(text, other, Cut(num_tokens, side))
    assert second_at is not None
    first_ids, kept_other = ids[1 : second_at - 1], ids[second_at:-1]
    lengths, room = (len(text.split()), len(other.split())), num_tokens - 3
    assert [ids[0], ids[second_at - 1], ids[-1]] == [0, 1, 1]
    assert len(first_ids) + len(kept_other) == min(sum(lengths), room)
    assert min(len(first_ids), len(kept_other)) == min(*lengths, room // 2)
    for one, ids_of_one in ((text, first_ids), (other, kept_other)):
        whole = [WORDS[word] for word in one.split()]
        assert ids_of_one == (whole[-len(ids_of_one) :] if side == "left" else whole[: len(ids_of_one)])


@pytest.mark.parametrize(
    ("encode", "least"),
    [(lambda cut: CODEC.encode("a b", cut=cut), 3), (lambda cut: CODEC.encode_pair("a b", "c", cut), 5)],
)
def test_a_limit_that_leaves_no_text_is_refused(encode: Callable[[Cut], object], least: int) -> None:
    assert encode(Cut(least))
    with pytest.raises(ValidationError, match=f"truncate_prompt_tokens must be at least {least}.*got {least - 1}"):
        encode(Cut(least - 1))
