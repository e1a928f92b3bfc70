"""The marks around reasoning, by the name of the parser that reads them: vLLM's names of reasoning parsers."""

from __future__ import annotations

# deepseek_r1 is qwen3 whose chat template has written the first mark at the end of the prompt.
REASONING_MARKS: dict[str, tuple[str, str]] = {
    "qwen3": ("<think>", "</think>"),
    "deepseek_r1": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "seed_oss": ("<seed:think>", "</seed:think>"),
    "kimi": ("◁think▷", "◁/think▷"),
}
# Instead of a name: the parser that fits the model's chat template, and none.
AUTO, NONE = "auto", "none"


def num_thought(token_ids: list[int], start: int, end: int) -> int | None:
    """Return how many tokens follow the last ``start``; None if there is none, or an ``end`` follows it."""
    backwards = token_ids[::-1]
    if start not in backwards:
        return None
    num_tokens = backwards.index(start)
    return None if end in backwards[:num_tokens] else num_tokens
