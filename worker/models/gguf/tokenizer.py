"""The tokenizer in a GGUF file as a tokenizer.json.

Sources: llama.cpp's ``llama-vocab.cpp`` (how a vocabulary splits text, which tokens end a text) and the tokenizers of
the same models in transformers' format.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE, Unigram, WordPiece

from ....shared.errors import ModelLoadError
from ....shared.values.shown import shown
from .container import GgufFile
from .merges import derive_merges
from .splits import COMPOSED, ENDS, SPLITS, WHOLE_WORDS

# token_type
_CONTROL, _USER_DEFINED = 3, 4
_SPACE = "\u2581"
_CONTINUED = "##"
# transformers' names by ggml's, one of which is misspelt in the format.
_SPECIAL = {
    "bos": "bos",
    "eos": "eos",
    "unk": "unknown",
    "pad": "padding",
    "cls": "cls",
    "sep": "seperator",
    "mask": "mask",
}


class GgufTokenizer:
    """Converts the tokenizer of ``file``.

    Raises:
        ModelLoadError: its kind, or its way of splitting text, is not supported; the message names it.
    """

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._tokens: list[str] = self._value("tokens", [])
        self._types: list[int] = self._value("token_type", [])
        if not self._tokens:
            raise ModelLoadError(f"{file.path} has no tokenizer (tokenizer.ggml.tokens); fetch the model again")
        kind = self._value("model")
        make = _KINDS.get(kind)
        if make is None:
            raise ModelLoadError(
                f"{file.path} has a tokenizer of the kind {shown(kind)} (tokenizer.ggml.model), and "
                f"{', '.join(_KINDS)} are read; fetch the model in transformers' format"
            )
        self._kind = kind
        self._pre = self._value("pre", "default") if kind == "gpt2" else ""
        try:
            self.tokenizer = make(self)
            self._add_tokens()
            self._frame_texts()
        except ModelLoadError:
            raise
        except Exception as error:  # tokenizers raises no other
            raise ModelLoadError(f"the tokenizer in {file.path} cannot be read: {error}; fetch it again") from error

    def config(self) -> dict[str, Any]:
        """Return the content of tokenizer_config.json."""
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        for name, key in _SPECIAL.items():
            token = self._special(key)
            if token is not None:
                config[f"{name}_token"] = token
        template = self._file.values.get("tokenizer.chat_template")
        return config | ({"chat_template": template} if isinstance(template, str) else {})

    def end_token_ids(self) -> list[int]:
        """Return the tokens that end a generation: those named in the file, and those known by their text."""
        declared = [self._value(f"{key}_token_id") for key in ("eos", "eot", "eom")]
        by_text = [index for index, token in enumerate(self._tokens) if token in ENDS and self._type(index) == _CONTROL]
        return [index for index in dict.fromkeys((*declared, *by_text)) if index is not None]

    def byte_level(self) -> Tokenizer:
        splits = SPLITS.get(self._pre)
        if splits is None:
            raise ModelLoadError(
                f"{self._file.path} splits text by tokenizer.ggml.pre {shown(self._pre)}, and {', '.join(SPLITS)} are "
                "known here; fetch the model in transformers' format"
            )
        merges = [tuple(merge.split(" ", 1)) for merge in self._value("merges", [])]
        tokenizer = Tokenizer(BPE(self._ids, merges, ignore_merges=self._pre in WHOLE_WORDS))
        cuts = [pre_tokenizers.Split(Regex(split), behavior="isolated") for split in splits]
        last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, last])
        tokenizer.decoder = decoders.ByteLevel()
        if self._pre in COMPOSED:
            tokenizer.normalizer = normalizers.NFC()
        return tokenizer

    def sentencepiece(self) -> Tokenizer:
        unknown = self._special("unknown")
        merges = [tuple(merge.split(" ", 1)) for merge in self._value("merges", [])]
        if not merges:
            merges = derive_merges(self._tokens, self._value("scores", [0.0] * len(self._tokens)))
        tokenizer = Tokenizer(
            BPE(self._ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True, ignore_merges=False)
        )
        begins_with_space = self._value("add_space_prefix", self._kind == "llama")
        spaces = normalizers.Replace(" ", _SPACE)
        tokenizer.normalizer = (
            normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if begins_with_space else spaces
        )
        parts = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        tokenizer.decoder = decoders.Sequence(
            [*parts, decoders.Strip(content=" ", left=1)] if begins_with_space else parts
        )
        return tokenizer

    def unigram(self) -> Tokenizer:
        scores = self._value("scores", [0.0] * len(self._tokens))
        unknown = self._value("unknown_token_id")
        tokenizer = Tokenizer(
            Unigram(list(zip(self._tokens, scores, strict=True)), unk_id=unknown, byte_fallback=False)
        )
        parts: list[Any] = []
        mapping = self._value("precompiled_charsmap")
        if mapping:
            parts.append(normalizers.Precompiled(np.array(mapping).astype(np.uint8).tobytes()))
        if self._value("remove_extra_whitespaces", False):
            parts += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
        tokenizer.normalizer = normalizers.Sequence(parts)
        scheme = "always" if self._value("add_space_prefix", True) else "never"
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme=scheme)
        tokenizer.decoder = decoders.Metaspace(replacement=_SPACE, prepend_scheme=scheme)
        return tokenizer

    def wordpiece(self) -> Tokenizer:
        """Tokens that begin a word are marked here, in transformers' format those that continue one."""

        def marked(index: int, token: str) -> str:
            if self._type(index) == _CONTROL:
                return token
            return token.removeprefix(_SPACE) if token.startswith(_SPACE) else f"{_CONTINUED}{token}"

        self._tokens = [marked(index, token) for index, token in enumerate(self._tokens)]
        unknown = self._special("unknown") or "[UNK]"
        tokenizer = Tokenizer(WordPiece(self._ids, unk_token=unknown, continuing_subword_prefix=_CONTINUED))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=self._value("normalizer.lowercase", True))
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece(prefix=_CONTINUED)
        return tokenizer

    def _add_tokens(self) -> None:
        """Add the tokens at which text is split first; their ids are those of the vocabulary."""

        def added_tokens(kind: int) -> list[AddedToken]:
            tokens = (token for token, each in zip(self._tokens, self._types, strict=False) if each == kind)
            return [AddedToken(token, normalized=False, special=kind == _CONTROL) for token in tokens]

        self.tokenizer.add_special_tokens(added_tokens(_CONTROL))
        self.tokenizer.add_tokens(added_tokens(_USER_DEFINED))

    def _frame_texts(self) -> None:
        """Put the tokens around a text that the file asks for, or that its kind of tokenizer has by default."""
        has_class = self._kind == "bert"
        begins = has_class or self._kind == "llama" or self._pre in WHOLE_WORDS
        # Files of tokenizers with classes name them as bos, some as cls.
        before = self._special("bos") or self._special("cls")
        after = self._special("seperator") if has_class else self._special("eos")
        first = before if before and self._value("add_bos_token", begins) else None
        last = after if after and self._value("add_eos_token", has_class or self._kind == "t5") else None
        if first is None and last is None:
            return
        ids = self._ids
        single = [token for token in (first, "$A", last) if token]
        pair = [token for token in (first, "$A", last, first and f"{first}:1", "$B:1", last and f"{last}:1") if token]
        self.tokenizer.post_processor = processors.TemplateProcessing(
            single=single, pair=pair, special_tokens=[(token, ids[token]) for token in {first, last} if token]
        )

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {token: index for index, token in enumerate(self._tokens)}

    def _type(self, index: int) -> int:
        return self._types[index] if index < len(self._types) else 0

    def _special(self, key: str) -> str | None:
        index = self._value(f"{key}_token_id")
        return self._tokens[index] if isinstance(index, int) and 0 <= index < len(self._tokens) else None

    def _value(self, name: str, default: Any = None) -> Any:
        return self._file.values.get(f"tokenizer.ggml.{name}", default)


_KINDS: dict[str, Callable[[GgufTokenizer], Tokenizer]] = {
    "gpt2": GgufTokenizer.byte_level,
    "llama": GgufTokenizer.sentencepiece,
    "gemma4": GgufTokenizer.sentencepiece,
    "t5": GgufTokenizer.unigram,
    "bert": GgufTokenizer.wordpiece,
}
