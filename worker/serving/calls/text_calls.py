"""Control calls about text, which the worker process answers: it has the tokenizer."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from ....shared.control.calls import UtilityAnswer
from ....shared.control.text import Detokenize, DetokenizedText, GetTokenizer, Tokenize, TokenizedText, TokenizerFile
from ....shared.errors import ValidationError
from ...text.tokenizer import TOKENIZER_FILE, TextCodec
from ..requests.pooled_text import LONG_PROMPT_CHARS


class TextCalls:
    """Answers with one model's tokenizer and chat template; ``folder`` is the model's."""

    def __init__(self, folder: Path, codec: TextCodec, max_model_len: int, vocab_size: int) -> None:
        self._folder = folder
        self._codec = codec
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size

    @property
    def functions(self) -> dict[type, Callable[[Any], Awaitable[UtilityAnswer]]]:
        """By type of call, what answers it."""
        return {Tokenize: self._tokenize, Detokenize: self._detokenize, GetTokenizer: self._get_tokenizer}

    async def _tokenize(self, call: Tokenize) -> TokenizedText:
        is_long = call.prompt is None or len(call.prompt) > LONG_PROMPT_CHARS
        token_ids = await asyncio.to_thread(self._encode, call) if is_long else self._encode(call)
        pieces = [self._codec.token_bytes[token_id] for token_id in token_ids] if call.has_pieces else []
        return TokenizedText(token_ids, self._max_model_len, pieces)

    async def _detokenize(self, call: Detokenize) -> DetokenizedText:
        for position, token_id in enumerate(call.token_ids):
            if token_id >= self._vocab_size:
                raise ValidationError(f"tokens[{position}] must be in [0, {self._vocab_size}), got {token_id}")
        if len(call.token_ids) > LONG_PROMPT_CHARS:
            return DetokenizedText(await asyncio.to_thread(self._decode, call.token_ids))
        return DetokenizedText(self._decode(call.token_ids))

    async def _get_tokenizer(self, _: GetTokenizer) -> TokenizerFile:
        return TokenizerFile(await asyncio.to_thread(self._compressed_file))

    def _compressed_file(self) -> bytes:
        return zlib.compress((self._folder / TOKENIZER_FILE).read_bytes())

    def _encode(self, call: Tokenize) -> list[int]:
        if call.messages is not None:
            return self._codec.encode_chat(call.messages, call.chat_template_kwargs)
        assert call.prompt is not None
        return self._codec.encode(call.prompt) if call.add_special_tokens else self._codec.encode_chunk(call.prompt)

    def _decode(self, token_ids: list[int]) -> str:
        return self._codec.decode(token_ids, skip_special_tokens=False)
