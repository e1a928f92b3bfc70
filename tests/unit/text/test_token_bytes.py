"""The bytes of single tokens joined are those of the text."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from penstock.worker.text.vocabulary import TokenBytes, TokenKinds, byte_alphabet


def test_of_a_byte_level_vocabulary() -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<é>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["the quick brown fox"] * 4, trainer)
    token_bytes = TokenBytes(tokenizer, TokenKinds.from_tokenizer(tokenizer))
    text = "the quick €, 日本\n"
    token_ids = tokenizer.encode(text).ids
    assert b"".join(token_bytes[token_id] for token_id in token_ids) == text.encode()
    assert any(token_bytes[token_id] == "€".encode()[:1] for token_id in token_ids)
    assert token_bytes[0] == "<é>".encode()
    assert token_bytes[10_000] == b""
    assert set(byte_alphabet()) == set(alphabet)


def test_of_a_vocabulary_with_space_marks_and_byte_fallback() -> None:
    bytes_ = [f"<0x{value:02X}>" for value in range(256)]
    vocabulary = {token: i for i, token in enumerate(["<unk>", *bytes_, "▁", "a", "▁a"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    token_bytes = TokenBytes(tokenizer, TokenKinds.from_tokenizer(tokenizer))
    assert [token_bytes[vocabulary[t]] for t in ("▁a", "<0xE2>", "▁")] == [b" a", b"\xe2", b" "]
