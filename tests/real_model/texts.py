"""Prompts and texts for the tests with real models."""

from __future__ import annotations

from random import Random

PROMPTS = (
    "What is the capital of France?",
    "Name three colours of the rainbow.",
    "Write one sentence about the sea.",
    "How many legs does a spider have?",
    "Translate 'good morning' into Spanish.",
    "What is the opposite of hot?",
    "List the days of the week.",
    "Explain in one sentence why the sky is blue.",
    "Give me a short poem about a cat.",
    "What is 7 plus 5?",
    "Who wrote Romeo and Juliet?",
    "Write a Python function that adds two numbers.",
    "What is the chemical symbol of gold?",
    "In which year did the Second World War end?",
    "Suggest a name for a small bakery.",
    "What do bees make?",
    "Describe a rainy day in two sentences.",
    "What is the largest planet of the solar system?",
    "Give an example of a prime number.",
    "How does a bicycle stay upright?",
    "Write a polite email that declines a meeting.",
    "What is the boiling point of water in degrees Celsius?",
    "Name an animal that lives in the desert.",
    "What is a haiku?",
    "Complete the proverb: the early bird",
    "Tell me a fact about whales.",
    "What does HTTP stand for?",
    "Write a JSON object with a name and an age.",
    "Why do leaves fall in autumn?",
    "Recommend a dish with tomatoes.",
)

SENTENCES = (
    "The river was high after the rain.",
    "After days of rain the water in the river rose.",
    "A cat sleeps on the warm stove.",
    "Two kittens are lying next to the heater.",
    "The meeting has been moved to Thursday at noon.",
    "Our quarterly results were better than expected.",
    "def add(a, b): return a + b",
    "Un petit village au bord de la mer.",
    "!",
    "Compilers translate programs from one language into another. " * 8,
)

_WORDS = (
    "river", " the", "The", " naïve", "Straße", "x_1", "camelCase", "SCREAMING_SNAKE", "don't", "we'll", "I'm", "3.14",
    "1,000,000", "0x1F", "2024-05-14", "::", "->", "!=", "===", "/*", "*/", "//", "#include", "<div>", "</div>", "{}",
    "[[]]", "\\n", "\n", "\n\n", "\n\n\n\n", "\t", "\t\t", " ", "  ", "    ", "\r\n", "\u00a0", "\u2003", "\u200b", "…",
    "—", "«", "»", "„", "“", "日本語", "中文字符", "한국어", "ไทย", "हिन्दी", "العربية", "עברית", "ελληνικά", "русский",
    "Ⅷ", "½", "٣", "५", "๗", "\U0001d7d8", "🙂", "👩‍🚀", "🏳️‍🌈", "👍🏽", "🇫🇷", "e\u0301", "a\u0308\u0323", "\ufffd",
    "\x00", "\x7f", "\x1b[0m", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_start", "im_end|>", "<s>",
    "<file_sep>",
)  # fmt: skip
_NUM_TEXTS = 220


def token_texts() -> list[str]:
    """Return 220 texts that tokenizers split differently: each of the words above, some of our own, and mixes."""
    rng = Random(41)
    texts = [
        *_WORDS,
        *PROMPTS,
        *SENTENCES,
        "for (int i = 0; i < n; i++) {\n\tsum += a[i];\n}\n",
        'SELECT "name", COUNT(*) FROM t WHERE x >= 10 GROUP BY 1;',
        '{"a": [1, 2.5, -3e-7, null, true], "b": {"c": "\\u00e9\\n"}}',
        "https://example.org/a/b?c=d&e=f#g user@example.org",
        "   leading and trailing   ",
        "A" * 200,
        "1234567890" * 12,
        "ab " * 60,
        " \n \n\t \n  x",
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n",
    ]
    while len(texts) < _NUM_TEXTS:
        texts.append("".join(rng.choice(_WORDS) for _ in range(rng.randint(2, 30))))
    return texts
