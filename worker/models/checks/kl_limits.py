"""Limits of what number formats may cost on a text, and the text. Needs no torch."""

from __future__ import annotations

from pathlib import Path

QUALITY_TEXT = Path(__file__).with_name("quality.txt")
# Largest KL divergence from float32 in nats, of SmolLM2 by weights and KV cache, on the first characters of the text.
# Lower them when a format gets better, and never raise them. They are a fifth above the measured values, for processors
# with other instructions.
KL_LIMITS = {
    ("bfloat16", "bfloat16"): 0.0015,
    ("gguf", "bfloat16"): 0.0047,
    ("int8", "bfloat16"): 0.007,
    ("int4-mixed", "bfloat16"): 0.049,
    ("int4", "bfloat16"): 0.09,
    ("bfloat16", "int8"): 0.0018,
    ("bfloat16", "fp8_e4m3"): 0.010,
}
# Other trained models may lose this multiple, since they and their languages differ.
_SLACK = 3


def largest_kl(weights: str | None, kv_cache: str | None) -> float | None:
    """Return the KL divergence from which a trained model in these formats deserves a warning; None if no trained model
    has been measured in them.

    Args:
        weights, kv_cache: None for those of the unquantised model.
    """
    plain = "bfloat16"
    limits = [KL_LIMITS.get((weights or plain, plain)), KL_LIMITS.get((plain, kv_cache or plain))]
    return None if None in limits else _SLACK * sum(limit or 0.0 for limit in limits)
