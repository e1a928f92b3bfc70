"""Control calls about text. The worker process answers them, because it has the tokenizer."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from ....shared.control.calls import UtilityAnswer
from ....shared.control.model import Detokenize, DetokenizedText, GetTokenizer, Tokenize, TokenizedText, TokenizerFile
from ....shared.errors import ValidationError
from ...text.thread import LONG_TEXT_CHARS, TextThread
from ...text.tokenizer import TOKENIZER_FILE, TextCodec


class TextCalls:
    """Text calls to one model, answered with its tokenizer and chat template; ``folder`` is the model's folder."""

    def __init__(self, folder: Path, codec: TextCodec, max_model_len: int, vocab_size: int) -> None:
        self._folder = folder
        self._codec = codec
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._thread = TextThread("text-call")

    @property
    def functions(self) -> dict[type, Callable[[Any], Awaitable[UtilityAnswer]]]:
        """Functions that answer calls, by type of call."""
        return {Tokenize: self._tokenize, Detokenize: self._detokenize, GetTokenizer: self._get_tokenizer}

    async def _tokenize(self, call: Tokenize) -> TokenizedText:
        num_chars = LONG_TEXT_CHARS + 1 if call.prompt is None else len(call.prompt)
        return await self._thread.run(lambda: self._tokenized(call), num_chars)

    async def _detokenize(self, call: Detokenize) -> DetokenizedText:
        return await self._thread.run(lambda: self._detokenized(call.token_ids), len(call.token_ids))

    async def _get_tokenizer(self, _: GetTokenizer) -> TokenizerFile:
        return TokenizerFile(await asyncio.to_thread(self._compressed_file))

    def _compressed_file(self) -> bytes:
        return zlib.compress((self._folder / TOKENIZER_FILE).read_bytes())

    def _tokenized(self, call: Tokenize) -> TokenizedText:
        token_ids = self._encode(call)
        pieces = [self._codec.token_bytes[token_id] for token_id in token_ids] if call.has_pieces else []
        return TokenizedText(token_ids, self._max_model_len, pieces)

    def _detokenized(self, token_ids: list[int]) -> DetokenizedText:
        for position, token_id in enumerate(token_ids):
            if token_id >= self._vocab_size:
                raise ValidationError(f"tokens[{position}] must be in [0, {self._vocab_size}), got {token_id}")
        return DetokenizedText(self._codec.decode(token_ids, skip_special_tokens=False))

    def _encode(self, call: Tokenize) -> list[int]:
        if call.messages is not None:
            return self._codec.encode_chat(call.messages, call.chat_template_kwargs)
        assert call.prompt is not None
        return self._codec.encode(call.prompt) if call.add_special_tokens else self._codec.encode_chunk(call.prompt)
