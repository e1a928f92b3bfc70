"""The tokenizer of a model folder, read with the ``tokenizers`` library alone.

transformers' AutoTokenizer would import torch (250 MB and 1.7 s in a process that needs neither).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from ...shared.errors import ModelLoadError, UnsupportedParameterError
from ...shared.params.answer_formats import OPENED_BY_PROMPT
from ...shared.params.chat import AUTO, NONE, num_thought
from ...shared.params.prompts import Cut
from ...shared.params.sampling import SamplingParams
from ...shared.process.heap import return_free_heap
from .chat_style import style_of
from .chat_template import ChatTemplate
from .detokenizer import DecodeContext, IncrementalDetokenizer
from .encoding import encode, encode_cut, encode_cut_pair, max_chars_per_token, tokenizing
from .message_roles import RoleSupport
from .model_files import read_json
from .vocabulary import TokenBytes, TokenKinds, bad_word_sequences, find_marks, find_think_token_ids, marks_of

TOKENIZER_FILE = "tokenizer.json"
# More tokens than templates write after the last message.
_NUM_TAIL_TOKENS = 64


class TextCodec:
    """Encoder of prompts and chat messages, and decoder of tokens.

    Methods that process a text raise ``RequestFailedError`` if the tokenizer or the chat template fails, with any
    exception.

    Attributes:
        token_bytes: bytes of each single token.
        chat_style: parsers of the model's tool calls and reasoning; that of the reasoning may be configured.
        can_think_first: whether its reasoning is between two known tokens, so that a grammar can begin after it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate | None,
        *,
        response_template: Mapping[str, Any] | None = None,
        reasoning_parser: str = AUTO,
    ) -> None:
        self._tokenizer = tokenizer
        self._kinds = TokenKinds.from_tokenizer(tokenizer)
        self._max_chars_per_token = max_chars_per_token(tokenizer)
        self.token_bytes = TokenBytes(tokenizer, self._kinds)
        self._chat_template = chat_template
        self.chat_style = style_of(chat_template, response_template, self._kinds.added.values())
        self._is_opened_by_template = self.chat_style.reasoning_parser == OPENED_BY_PROMPT
        if reasoning_parser != AUTO:
            self._is_opened_by_template = False
            name = "" if reasoning_parser == NONE else reasoning_parser
            self.chat_style = self.chat_style._replace(reasoning_parser=name)
        name = self.chat_style.reasoning_parser
        self._think_token_ids = find_think_token_ids(tokenizer, name)
        self._marks = marks_of(name) or find_marks(tokenizer)
        self.can_think_first = bool(name) and self._think_token_ids is not None

    @classmethod
    def load(cls, folder: Path, *, reasoning_parser: str = AUTO) -> TextCodec:
        """Read ``tokenizer.json``, ``tokenizer_config.json`` and ``chat_template.jinja`` from a model folder.

        Args:
            reasoning_parser: name of the parser of the model's reasoning, "none", or "auto" to derive it from the
                template.

        Raises:
            ModelLoadError: a file is missing or cannot be read.
        """
        path = folder / TOKENIZER_FILE
        if not path.is_file():
            raise ModelLoadError(f"model folder {folder} lacks {TOKENIZER_FILE}")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for a broken file
            raise ModelLoadError(f"{path} cannot be read: {error}") from error
        # Reading the file takes about as much memory in addition as the tokenizer keeps.
        return_free_heap()
        tokenizer.no_truncation()
        tokenizer.no_padding()
        config = read_json(folder / "tokenizer_config.json")
        return cls(
            tokenizer,
            ChatTemplate.load(folder, config),
            response_template=config.get("response_template") or config.get("response_schema"),
            reasoning_parser=reasoning_parser,
        )

    @property
    def has_chat_template(self) -> bool:
        """Whether a prompt may consist of messages."""
        return self._chat_template is not None

    @property
    def roles(self) -> RoleSupport:
        """Places of system and developer messages that the chat template renders."""
        return RoleSupport() if self._chat_template is None else self._chat_template.roles

    @property
    def can_show_tools(self) -> bool:
        """Whether the chat template writes ``tools`` into the prompt; True without a template."""
        return self._chat_template is None or self._chat_template.uses_tools

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        cut: Cut | None = None,
        check_length: Callable[[int], None] | None = None,
    ) -> list[int]:
        """Return the token ids of ``text``, with the special tokens that the model expects around it.

        Args:
            cut: truncation of the text; the special tokens are kept.
            check_length: called with the number of tokens, unless the text is cut. If it raises, no list of tokens is
                created, which would hold the GIL.

        Raises:
            ValidationError: ``cut`` leaves no space for a token of the text.
        """
        with tokenizing():
            if cut is None:
                encoded = encode(self._tokenizer, text, add_special_tokens=add_special_tokens)
                if check_length is not None:
                    check_length(len(encoded))
                return encoded.ids
            return encode_cut(self._tokenizer, text, cut, add_special_tokens=add_special_tokens)

    def min_num_tokens(self, text: str) -> int:
        """Return a lower bound of the number of tokens of ``text``, without tokenizing it."""
        return math.ceil(len(text) / self._max_chars_per_token)

    def encode_pair(self, text: str, other: str, cut: Cut | None = None) -> tuple[list[int], int | None]:
        """Return the token ids of a pair of texts, and the position at which the second text begins.

        The position is None if the model does not distinguish the tokens of the two texts.

        Raises:
            ValidationError: ``cut`` leaves no space for a token of each text.
        """
        with tokenizing():
            if cut is None:
                encoded = encode(self._tokenizer, text, other)
                token_ids, type_ids = encoded.ids, encoded.type_ids
            else:
                token_ids, type_ids = encode_cut_pair(self._tokenizer, text, other, cut)
        return token_ids, type_ids.index(1) if 1 in type_ids else None

    def encode_chunk(self, text: str) -> list[int]:
        """Return the token ids of ``text`` without special tokens, since it follows other tokens."""
        return self.encode(text, add_special_tokens=False)

    def render_chat(self, messages: list[dict[str, Any]], kwargs: dict[str, Any] | None) -> str:
        """Render ``messages`` with the chat template, which includes the special tokens.

        Raises:
            ValidationError: the model has no chat template, or the template refuses the messages.
        """
        if self._chat_template is None:
            raise ChatTemplate.missing()
        return self._chat_template.render(messages, kwargs or {})

    def encode_chat(self, messages: list[dict[str, Any]], kwargs: dict[str, Any] | None) -> list[int]:
        """Return the token ids of ``render_chat``."""
        return self.encode(self.render_chat(messages, kwargs), add_special_tokens=False)

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """Return the text of ``token_ids`` alone."""
        with tokenizing():
            # A batch call releases the GIL.
            return self._tokenizer.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)[0]

    def complete(self, params: SamplingParams) -> SamplingParams:
        """Return ``params`` with the token ids that an engine needs and only a tokenizer knows.

        Raises:
            ValidationError: one of ``bad_words`` has no tokens.
            UnsupportedParameterError: a thinking budget, or a grammar after the thinking, for a model without tokens
                that mark its thinking.
        """
        if params.bad_words:
            with tokenizing():
                sequences = bad_word_sequences(self._tokenizer, params.bad_words)
            params = msgspec.structs.replace(params, bad_words_token_ids=sequences)
        grammar = params.structured_outputs
        is_awaited = grammar is not None and grammar.enable_in_reasoning is False
        if params.is_thinking_limited or is_awaited:
            if self._think_token_ids is None:
                parameter = "structured_outputs.enable_in_reasoning=False" if is_awaited else None
                raise UnsupportedParameterError(
                    f"{parameter or f'thinking_token_budget={params.thinking_token_budget}'} needs a model whose "
                    "vocabulary has tokens such as <think> and </think>, and this one has none; leave it at None"
                )
            params = msgspec.structs.replace(params, think_token_ids=self._think_token_ids)
        return params

    def ends_in_reasoning(self, token_ids: Sequence[int], messages: Sequence[Mapping[str, Any]]) -> bool | None:
        """Return whether a prompt ends within the model's thinking, by its last mark; None if unknown.

        Only whitespace may follow that mark, because a mark within a message is text. If the output continues the last
        message, which is an assistant's, the mark may be anywhere in the prompt.

        Args:
            token_ids: tokens of the prompt, which was rendered from ``messages``.
        """
        if self._marks is None:
            return None
        is_continued = bool(messages) and messages[-1].get("role") == "assistant"
        tail = token_ids if is_continued else token_ids[-_NUM_TAIL_TOKENS:]
        text = self.decode(list(tail), skip_special_tokens=False)
        start_at, end_at = map(text.rfind, self._marks)
        mark_at, mark = max((start_at, self._marks[0]), (end_at, self._marks[1]))
        if mark_at >= 0 and (is_continued or not text[mark_at + len(mark) :].strip()):
            return start_at > end_at
        # A template that opens the thinking in the usual prompt has not done so in this one.
        return False if self._is_opened_by_template else None

    def has_begun_thinking(self, token_ids: list[int]) -> bool:
        """Return whether ``token_ids`` end within the model's thinking."""
        marks = self._think_token_ids
        return marks is not None and num_thought(token_ids, *marks) is not None

    def detokenizer(
        self,
        prompt_token_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool,
        spaces_between_special_tokens: bool = True,
    ) -> IncrementalDetokenizer:
        """Return a detokenizer for one request's output, which follows ``prompt_token_ids``."""
        skipped_ids = self._kinds.special_ids if skip_special_tokens else frozenset()
        with tokenizing():
            return IncrementalDetokenizer(
                self._tokenizer,
                self._kinds,
                DecodeContext.of_prompt(
                    prompt_token_ids, self._tokenizer, self._kinds, self.token_bytes, skipped_ids=skipped_ids
                ),
                skip_special_tokens=skip_special_tokens,
                spaces_between_special_tokens=spaces_between_special_tokens,
            )
