"""A thread works on long text, with the GIL free, and the event loop continues meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from penstock.shared.broker import Claim
from penstock.shared.control.model import Detokenize, Tokenize
from penstock.shared.errors import PromptTooLongError
from penstock.shared.messages.core import Ready
from penstock.shared.messages.requests import EngineCoreRequest, InputChunk
from penstock.shared.params.pooling import PoolingParams, PoolingSetup
from penstock.shared.params.sampling import SamplingParams
from penstock.worker.serving.calls.call_handler import TextCalls
from penstock.worker.serving.requests.intake import Intake
from penstock.worker.text.chat_template import ChatTemplate
from penstock.worker.text.encoding import encode, max_chars_per_token
from penstock.worker.text.thread import LONG_TEXT_CHARS
from penstock.worker.text.tokenizer import TextCodec
from penstock.worker.text.vocabulary import byte_alphabet

from ...processes import DEADLINE_S

LONG_TEXT = "17 + 4 = 21. " * LONG_TEXT_CHARS
READY = Ready(
    model_folder="/m",
    architecture="A",
    max_model_len=1_000_000,
    num_blocks=9,
    block_size=16,
    dtype="float32",
    device="cpu",
    vocab_size=400,
    eos_token_ids=[2],
    supported_tasks=("generate", "embed"),
    pooling=PoolingSetup(),
)


@pytest.fixture(scope="module")
def codec(demo_model: Path) -> TextCodec:
    return TextCodec.load(demo_model)


def turning(part: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``part``, held until the event loop that is running now has made a turn."""
    loop = asyncio.get_running_loop()

    def held(*args: Any, **options: Any) -> Any:
        has_turned = threading.Event()
        loop.call_soon_threadsafe(has_turned.set)
        assert has_turned.wait(DEADLINE_S), "the event loop stands still"
        return part(*args, **options)

    return held


async def prepare(intake: Intake, **fields: Any) -> EngineCoreRequest:
    if "pooling_params" not in fields:
        fields.setdefault("sampling_params", SamplingParams())
    payload = msgspec.msgpack.encode(EngineCoreRequest(request_id="r", **fields))
    return await intake.prepare(Claim("r", payload, epoch=1, num_logged_tokens=0, attempt=1))


@pytest.mark.parametrize(
    ("part", "fields"),
    [
        ("encode", {"prompt": LONG_TEXT}),
        ("encode", {"prompt": LONG_TEXT, "sampling_params": SamplingParams(truncate_prompt_tokens=5)}),
        ("render_chat", {"messages": [{"role": "user", "content": LONG_TEXT}]}),
        ("encode", {"messages": [{"role": "user", "content": LONG_TEXT}]}),
        ("encode_pair", {"prompt": LONG_TEXT, "text_pair": "w", "pooling_params": PoolingParams()}),
        ("encode_chunk", {"prompt": "1", "prediction": LONG_TEXT}),
        ("complete", {"prompt": "1", "sampling_params": SamplingParams(bad_words=["17 + 4"] * 1000)}),
    ],
    ids=["prompt", "cut", "template", "chat", "pair", "prediction", "bad-words"],
)
async def test_the_loop_runs_while_a_long_text_is_prepared(
    codec: TextCodec, part: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    intake = Intake(codec, READY)
    expected = await prepare(intake, **fields)
    monkeypatch.setattr(codec, part, turning(getattr(codec, part)))
    assert await prepare(intake, **fields) == expected


async def test_the_loop_runs_while_a_long_chunk_is_prepared(codec: TextCodec, monkeypatch: pytest.MonkeyPatch) -> None:
    intake = Intake(codec, READY)
    request = await prepare(intake, prompt="1", resumable=True)
    monkeypatch.setattr(codec, "encode_chunk", turning(codec.encode_chunk))
    segment = await intake.segment(request, [msgspec.msgpack.encode(InputChunk(prompt=LONG_TEXT))], [])
    assert segment.number == 0


async def test_the_loop_runs_while_a_call_works_on_long_text(
    codec: TextCodec, demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = TextCalls(demo_model, codec, 100, 400)
    for part in ("encode", "render_chat", "decode"):
        monkeypatch.setattr(codec, part, turning(getattr(codec, part)))
    tokenized = await calls.functions[Tokenize](Tokenize(prompt=LONG_TEXT, has_pieces=True))
    assert b"".join(tokenized.pieces) == b"<s>" + LONG_TEXT.encode()  # type: ignore[union-attr]
    await calls.functions[Tokenize](Tokenize(messages=[{"role": "user", "content": LONG_TEXT}]))
    text = await calls.functions[Detokenize](Detokenize(token_ids=tokenized.token_ids[1:]))  # type: ignore[union-attr]
    assert text.text == LONG_TEXT  # type: ignore[union-attr]


@pytest.mark.parametrize("work", ["encode", "decode"])
async def test_the_loop_makes_turns_while_the_library_works(codec: TextCodec, work: str) -> None:
    """The library must not hold the GIL. On a busy machine a loop may need a longer text to make its turns."""
    num_turns = 0
    for doubling in range(4):
        text = LONG_TEXT * (4 << doubling)
        token_ids = codec.encode(text)
        works = {
            "encode": partial(codec.encode, text),
            "decode": partial(codec.decode, token_ids, skip_special_tokens=True),
        }
        working = asyncio.ensure_future(asyncio.to_thread(works[work]))
        num_turns = 0
        while not working.done():
            num_turns += 1
            await asyncio.sleep(0)
        if num_turns >= 100:
            return
    raise AssertionError(f"{num_turns} turns of the event loop")


async def test_a_prompt_that_cannot_fit_is_not_tokenized(codec: TextCodec, monkeypatch: pytest.MonkeyPatch) -> None:
    intake = Intake(codec, msgspec.structs.replace(READY, max_model_len=10))
    monkeypatch.setattr("penstock.worker.text.tokenizer.encode", None)
    for fields in ({"prompt": LONG_TEXT}, {"messages": [{"role": "user", "content": LONG_TEXT}]}):
        with pytest.raises(PromptTooLongError, match=r"has at least \d+ tokens, but max_model_len is 10, and at"):
            await prepare(intake, **fields)
    with pytest.raises(PromptTooLongError, match=r"prompt has at least \d+ tokens, but max_model_len is 10$"):
        await prepare(intake, prompt=LONG_TEXT, pooling_params=PoolingParams())


def byte_level(*normalizer: normalizers.Normalizer) -> Tokenizer:
    """Return a tokenizer with a token for each byte, and some longer ones."""
    vocab = {char: number for number, char in enumerate(byte_alphabet())}
    merges = [("a", "b"), ("ab", "ab"), ("\u0120", "\u0120"), ("\u00c3", "\u00a9")]
    vocab |= {left + right: len(vocab) + number for number, (left, right) in enumerate(merges)}
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if normalizer:
        tokenizer.normalizer = normalizers.Sequence(list(normalizer))
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Return a tokenizer as SentencePiece models have it."""
    vocab = {f"<0x{value:02X}>": value for value in range(256)} | {"a": 256, "b": 257, "ab": 258, "\u2581": 259}
    tokenizer = Tokenizer(models.BPE(vocab, [("a", "b")], byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    return tokenizer


def with_added(tokenizer: Tokenizer) -> Tokenizer:
    """Add a token that is longer than any other."""
    tokenizer.add_tokens([AddedToken("<long token>")])
    return tokenizer


BOUNDED = {
    "byte-level": (byte_level(), 4),
    "composed": (byte_level(normalizers.NFC()), 16),
    "compatible": (byte_level(normalizers.NFKC()), 16),
    "decomposed": (byte_level(normalizers.NFD()), 4),
    "byte-fallback": (byte_fallback(), 6),
    "added": (with_added(byte_level()), 12),
}


@given(st.text(st.one_of(st.sampled_from("ab e\u0301\u0327\uac00\u1100\u1161\ufb01 "), st.characters(codec="utf-8"))))
@pytest.mark.parametrize("name", BOUNDED)
def test_no_text_has_fewer_tokens_than_its_bound(name: str, text: str) -> None:
    tokenizer, max_chars = BOUNDED[name]
    assert max_chars_per_token(tokenizer) == max_chars
    for one in (text, text * 5, f"{text}<long token>" * 3, text + " " * 20):
        assert len(encode(tokenizer, one, add_special_tokens=False).ids) >= len(one) / max_chars


def test_tokenizers_that_drop_characters_have_no_bound() -> None:
    dropping = [
        byte_level(normalizers.Strip()),
        byte_level(normalizers.Replace(Regex(" +"), " ")),
        byte_level(normalizers.Replace("ab", "")),
        byte_level(normalizers.StripAccents()),
        Tokenizer(models.WordLevel({"a": 0}, unk_token="a")),
        Tokenizer(models.WordPiece({"a": 0}, unk_token="a")),
        Tokenizer(models.Unigram([("a", 0.0)], unk_id=0)),
        Tokenizer(models.BPE({"a": 0}, [], unk_token="a", fuse_unk=True)),
    ]
    splitting = byte_level()
    splitting.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(use_regex=False)]
    )
    stripping = byte_level()
    stripping.add_tokens([AddedToken("<x>", rstrip=True)])
    for tokenizer in (*dropping, splitting, stripping):
        assert max_chars_per_token(tokenizer) == float("inf")
        assert TextCodec(tokenizer, ChatTemplate("", {})).min_num_tokens("a" * 1000) == 0
