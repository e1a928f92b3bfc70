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
from ...shared.params.reasoning import AUTO, NONE, REASONING_MARKS, num_thought
from ...shared.params.sampling import SamplingParams
from ...shared.params.tokenization import Cut
from .chat_style import OPENED_BY_PROMPT, ChatStyle, style_of
from .chat_template import ChatTemplate
from .cutting import encode_cut, encode_cut_pair
from .decode_context import DecodeContext
from .detokenizer import IncrementalDetokenizer
from .encoding import encode, max_chars_per_token, tokenizing
from .model_files import read_json
from .token_bytes import TokenBytes
from .token_kinds import TokenKinds
from .token_sequences import bad_word_sequences, find_marks, find_think_token_ids

TOKENIZER_FILE = "tokenizer.json"
# Longer than what templates write behind the last message.
_NUM_TAIL_TOKENS = 64


class TextCodec:
    """Encodes prompts and chat messages, and decodes tokens; ``token_bytes`` has those of each single token.

    Raises, each method that is given a text:
        RequestFailedError: the tokenizer or the chat template failed, with whatever exception.

    Attributes:
        chat_style: how the model writes tool calls and reasoning, as far as its chat template shows it, or as it was
            said of the reasoning.
        can_think_first: whether its reasoning is between two tokens, so that a grammar can begin behind them.
    """

    def __init__(
        self, tokenizer: Tokenizer, chat_template: ChatTemplate | None, *, reasoning_parser: str = AUTO
    ) -> None:
        self._tokenizer = tokenizer
        self._kinds = TokenKinds.of(tokenizer)
        self._max_chars_per_token = max_chars_per_token(tokenizer)
        self.token_bytes = TokenBytes(tokenizer, self._kinds)
        self._chat_template = chat_template
        self.chat_style = ChatStyle() if chat_template is None else style_of(chat_template)
        self._is_opened_by_template = self.chat_style.reasoning_parser == OPENED_BY_PROMPT
        if reasoning_parser != AUTO:
            self._is_opened_by_template = False
            name = "" if reasoning_parser == NONE else reasoning_parser
            self.chat_style = self.chat_style._replace(reasoning_parser=name)
        name = self.chat_style.reasoning_parser
        self._think_token_ids = find_think_token_ids(tokenizer, name)
        self._marks = REASONING_MARKS.get(name) or find_marks(tokenizer)
        self.can_think_first = bool(name) and self._think_token_ids is not None

    @classmethod
    def load(cls, folder: Path, *, reasoning_parser: str = AUTO) -> TextCodec:
        """Read ``tokenizer.json``, ``tokenizer_config.json`` and ``chat_template.jinja`` from a model folder.

        Args:
            reasoning_parser: the name of how the model marks its reasoning, "none", or "auto": as its template shows.

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
        tokenizer.no_truncation()
        tokenizer.no_padding()
        template = ChatTemplate.load(folder, read_json(folder / "tokenizer_config.json"))
        return cls(tokenizer, template, reasoning_parser=reasoning_parser)

    @property
    def has_chat_template(self) -> bool:
        """Whether a prompt may be messages."""
        return self._chat_template is not None

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        cut: Cut | None = None,
        check_length: Callable[[int], None] | None = None,
    ) -> list[int]:
        """Token ids of ``text``, with the special tokens the model expects around it; those stay where it is cut.

        Args:
            check_length: is called with the number of tokens, unless the text is cut. What it raises spares the time
                for a list of them, in which the GIL is held.

        Raises:
            ValidationError: what is kept has no room for a token of the text.
        """
        with tokenizing():
            if cut is None:
                encoded = encode(self._tokenizer, text, add_special_tokens=add_special_tokens)
                if check_length is not None:
                    check_length(len(encoded))
                return encoded.ids
            return encode_cut(self._tokenizer, text, cut, add_special_tokens=add_special_tokens)

    def min_num_tokens(self, text: str) -> int:
        """How many tokens ``text`` has at least, known without tokenizing it."""
        return math.ceil(len(text) / self._max_chars_per_token)

    def encode_pair(self, text: str, other: str, cut: Cut | None = None) -> tuple[list[int], int | None]:
        """Token ids of two texts as the model judges them together, and where those of the second begin.

        None if the model does not tell the tokens of the two apart.

        Raises:
            ValidationError: what is kept has no room for a token of each.
        """
        with tokenizing():
            if cut is None:
                encoded = encode(self._tokenizer, text, other)
                token_ids, type_ids = encoded.ids, encoded.type_ids
            else:
                token_ids, type_ids = encode_cut_pair(self._tokenizer, text, other, cut)
        return token_ids, type_ids.index(1) if 1 in type_ids else None

    def encode_chunk(self, text: str) -> list[int]:
        """Token ids of ``text`` alone: it follows on other tokens."""
        return self.encode(text, add_special_tokens=False)

    def render_chat(self, messages: list[dict[str, Any]], kwargs: dict[str, Any] | None) -> str:
        """The prompt of ``messages`` under the chat template, which writes the special tokens itself.

        Raises:
            ValidationError: the model has no chat template, or the template refuses the messages.
        """
        if self._chat_template is None:
            raise ChatTemplate.missing()
        return self._chat_template.render(messages, kwargs or {})

    def encode_chat(self, messages: list[dict[str, Any]], kwargs: dict[str, Any] | None) -> list[int]:
        """Token ids of ``render_chat``."""
        return self.encode(self.render_chat(messages, kwargs), add_special_tokens=False)

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """The text of ``token_ids`` by themselves."""
        with tokenizing():
            # As for texts, a batch leaves the GIL free.
            return self._tokenizer.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)[0]

    def complete(self, params: SamplingParams) -> SamplingParams:
        """Return ``params`` with the token ids that an engine needs and only a tokenizer knows.

        Raises:
            ValidationError: one of ``bad_words`` has no tokens.
            UnsupportedParameterError: ``thinking_token_budget`` for a model without marks around its thinking.
        """
        if params.bad_words:
            with tokenizing():
                sequences = bad_word_sequences(self._tokenizer, params.bad_words)
            params = msgspec.structs.replace(params, bad_words_token_ids=sequences)
        grammar = params.structured_outputs
        is_awaited = grammar is not None and grammar.enable_in_reasoning is False
        if params.is_thinking_limited or is_awaited:
            if self._think_token_ids is None:
                wanted = "structured_outputs.enable_in_reasoning=False" if is_awaited else None
                raise UnsupportedParameterError(
                    f"{wanted or f'thinking_token_budget={params.thinking_token_budget}'} needs a model whose "
                    "vocabulary has tokens such as <think> and </think>, and this one has none; leave it at None"
                )
            params = msgspec.structs.replace(params, think_token_ids=self._think_token_ids)
        return params

    def ends_in_reasoning(self, token_ids: Sequence[int], messages: Sequence[Mapping[str, Any]]) -> bool | None:
        """Return whether a prompt ends within the model's thinking, by its last mark; None if it does not show it.

        Nothing but whitespace may follow that mark: one that somebody wrote in a message is text. If the output
        continues the last message, an assistant's, the mark may be anywhere in it.

        Args:
            token_ids: of the prompt, which was rendered from ``messages``.
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
        # A template that opens the thinking of the usual prompt has left it out of this one.
        return False if self._is_opened_by_template else None

    def has_begun_thinking(self, token_ids: list[int]) -> bool:
        """Whether ``token_ids`` end within the model's thinking."""
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
