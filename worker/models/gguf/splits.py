"""How the tokenizers of GGUF files split text before byte-level BPE, by ``tokenizer.ggml.pre``.

Sources: the tokenizers of the same models in transformers' format, and llama.cpp's ``llama-vocab.cpp``.
"""

from __future__ import annotations

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_ENDING = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_ENDING}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_ENDING}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased(upper: str, lower: str, contractions: str, digits: str, after_signs: str) -> str:
    """Return the pattern of words with capitals first, or of capitals alone."""
    before = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{before}{upper}*{lower}+{contractions}|{before}{upper}+{lower}*{contractions}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[{after_signs}]*|{_SPACES}"
    )


_TEKKEN = _cased(_UPPER, _LOWER, "", r"\p{N}", r"\r\n/")
_GPT4O = _cased(_UPPER, _LOWER, f"{_CONTRACTIONS}?", r"\p{N}{1,3}", r"\r\n/")
_NO_HAN = r"&&[^\p{Han}]]"
_KIMI = r"\p{Han}+|" + _cased(
    _UPPER.replace("]", _NO_HAN), _LOWER.replace("]", _NO_HAN), f"{_CONTRACTIONS}?", r"\p{N}{1,3}", r"\r\n"
)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)
# Of syllables and characters of East Asia.
_EAST_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK = (
    r"[\r\n]",
    # Letters with case, but for the alphabets of mathematics.
    r"\s?[\p{Lu}\p{Ll}\p{Lt}&&[^\x{1d400}-\x{1d7ff}]]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _EAST_ASIAN,
    r"\p{N}+",
)
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_SEED = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
_EXAONE_MOE = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
# Of files from before there was the key.
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")

_FULL_GPT2 = (
    "gpt-2",
    "mpt",
    "olmo",
    "jais",
    "trillion",
    "granite-docling",
    "phi-2",
    "exaone4",
    "modern-bert",
    "mellum",
)
_JINA = ("jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "jina-v1-en", "jina-v2-code")
# These use a word that is a token unchanged, whatever its merges, and start a text with bos.
WHOLE_WORDS = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2", "midm-2.0", "jina-v5-nano")
WHOLE_WORDS = (*WHOLE_WORDS, "tekken")
# Their tokenizers first compose accents and letters.
COMPOSED = ("qwen2", "deepseek-r1-qwen", "qwen35")
# The patterns that split a text, applied in turn.
SPLITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys((*_FULL_GPT2, *_JINA, "roberta-bpe", "gigachat", "a.x-4.0"), (_GPT2,)),
    **dict.fromkeys((*WHOLE_WORDS, "smaug-bpe", "dbrx", "glm4", "chatglm-bpe"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "hunyuan", "stablelm2", "grok-2", "solar-open"), (_QWEN2,)),
    **dict.fromkeys(("kormo", "f2llmv2"), (_QWEN2,)),
    "qwen35": (_QWEN35,),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"),
        (r"\p{N}", _GPT2),
    ),
    "tekken": (_TEKKEN,),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2", "kanana2"), (_GPT4O,)),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), (r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O)),
    "kimi-k2": (_KIMI,),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _DEEPSEEK3),
    "deepseek-llm": _DEEPSEEK,
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, r"\p{N}"),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), (_BLOOM,)),
    "viking": (_BLOOM, r"\p{N}"),
    "superbpe": (r"\p{N}+", r"(?=(\d{3})+(?!\d))"),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), (_BAILING,)),
    "seed-coder": (_SEED,),
    "exaone-moe": (_EXAONE_MOE,),
    "falcon": _FALCON,
    "default": _DEFAULT,
}
# Tokens that end a turn or a text in some family; a file names only one of them.
ENDS = frozenset(
    (
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<end_of_turn>",
        "<turn|>",
        "<|endoftext|>",
        "<|eom_id|>",
        "<|end_of_text|>",
        "<|return|>",
        "<|call|>",
        "<|flush|>",
        "<|calls|>",
        "<EOT>",
        "_<EOT>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
        "<eos>",
        "[EOS]",
        "[e~[",
        "</s>",
    )
)
