"""The tokenizer in a GGUF file as a tokenizer.json.

Sources: llama.cpp's ``llama-vocab.cpp`` (how a vocabulary splits text, which tokens end a text) and the tokenizers of
the same models in transformers' format.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from ....shared.errors import ModelLoadError
from ....shared.values.shown import shown
from .container import GgufFile

# token_type
_CONTROL, _USER_DEFINED = 3, 4
_SPACE = "\u2581"

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_ENDING = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_ENDING}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_ENDING}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# By tokenizer.ggml.pre: the patterns that split a text, applied in turn.
_SPLITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "olmo", "phi-2", "jina-es", "jina-de"), (_GPT2,)),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "smaug-bpe", "dbrx"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), (_QWEN2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), (r"\p{N}", _GPT2)),
    "tekken": (_TEKKEN,),
}
# Their tokenizers first compose accents and letters.
_COMPOSED = ("qwen2", "deepseek-r1-qwen")
# These use a word that is a token unchanged, whatever its merges, and start a text with bos.
_WHOLE_WORDS = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "tekken")
# Tokens that end a turn or a text in some family; a file names only one of them.
_ENDS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "</s>",
)


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
                f"{' and '.join(_KINDS)} are read; fetch the model in transformers' format"
            )
        self._is_sentencepiece = kind == "llama"
        self._pre = "" if self._is_sentencepiece else self._value("pre")
        try:
            self.tokenizer = make(self)
            self._add_tokens()
            self._add_bos()
        except ModelLoadError:
            raise
        except Exception as error:  # tokenizers raises no other
            raise ModelLoadError(f"the tokenizer in {file.path} cannot be read: {error}; fetch it again") from error

    def config(self) -> dict[str, Any]:
        """Return the content of tokenizer_config.json."""
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
            token = self._special(key)
            if token is not None:
                config[f"{name}_token"] = token
        template = self._file.values.get("tokenizer.chat_template")
        return config | ({"chat_template": template} if isinstance(template, str) else {})

    def end_token_ids(self) -> list[int]:
        """Return the tokens that end a generation: those named in the file, and those known by their text."""
        declared = [self._value(f"{key}_token_id") for key in ("eos", "eot", "eom")]
        by_text = [
            index for index, token in enumerate(self._tokens) if token in _ENDS and self._type(index) == _CONTROL
        ]
        return [index for index in dict.fromkeys((*declared, *by_text)) if index is not None]

    def byte_level(self) -> Tokenizer:
        splits = _SPLITS.get(self._pre)
        if splits is None:
            raise ModelLoadError(
                f"{self._file.path} splits text by tokenizer.ggml.pre {shown(self._pre)}, which is not known here; "
                "fetch the model in transformers' format"
            )
        merges = [tuple(merge.split(" ", 1)) for merge in self._value("merges", [])]
        tokenizer = Tokenizer(BPE(self._vocabulary(), merges, ignore_merges=self._pre in _WHOLE_WORDS))
        cuts = [pre_tokenizers.Split(Regex(split), behavior="isolated") for split in splits]
        last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, last])
        tokenizer.decoder = decoders.ByteLevel()
        if self._pre in _COMPOSED:
            tokenizer.normalizer = normalizers.NFC()
        return tokenizer

    def sentencepiece(self) -> Tokenizer:
        unknown = self._special("unknown")
        merges = [tuple(merge.split(" ", 1)) for merge in self._value("merges", [])] or self._derived_merges()
        tokenizer = Tokenizer(
            BPE(self._vocabulary(), merges, unk_token=unknown, fuse_unk=True, byte_fallback=True, ignore_merges=False)
        )
        begins_with_space = self._value("add_space_prefix", True)
        spaces = normalizers.Replace(" ", _SPACE)
        tokenizer.normalizer = (
            normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if begins_with_space else spaces
        )
        parts = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        tokenizer.decoder = decoders.Sequence(
            [*parts, decoders.Strip(content=" ", left=1)] if begins_with_space else parts
        )
        return tokenizer

    def _derived_merges(self) -> list[tuple[str, str]]:
        """Return the pairs that form each token, by descending score of the token, as sentencepiece merges."""
        tokens, ids = self._tokens, self._vocabulary()
        scores = np.array(self._value("scores", [0.0] * len(tokens)), dtype=float)
        merges = []
        # A million cuts with large vocabularies, so each costs little more than two slices and two searches.
        for index in np.argsort(-scores, kind="stable").tolist():
            token = tokens[index]
            pairs = [
                (left, right)
                for at in range(1, len(token))
                if (left := token[:at]) in ids and (right := token[at:]) in ids
            ]
            if len(pairs) > 1:
                pairs.sort(key=lambda pair: ids[pair[0]])
            merges += pairs
        return merges

    def _add_tokens(self) -> None:
        """Add the tokens at which text is split first; their ids are those of the vocabulary."""

        def added_tokens(kind: int) -> list[AddedToken]:
            tokens = (token for token, each in zip(self._tokens, self._types, strict=False) if each == kind)
            return [AddedToken(token, normalized=False, special=kind == _CONTROL) for token in tokens]

        self.tokenizer.add_special_tokens(added_tokens(_CONTROL))
        self.tokenizer.add_tokens(added_tokens(_USER_DEFINED))

    def _add_bos(self) -> None:
        bos, index = self._special("bos"), self._value("bos_token_id")
        begins = self._is_sentencepiece or self._pre in _WHOLE_WORDS
        if bos is None or not self._value("add_bos_token", begins):
            return
        self.tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, index)]
        )

    def _vocabulary(self) -> dict[str, int]:
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
}
