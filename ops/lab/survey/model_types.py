"""Which model types are tried."""

from __future__ import annotations

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

_DRAFTS = "drafts for another model, whose keys and values it reads"
_SOUNDS = "makes sounds, not text"
_OF_ITS_TEXT_MODEL = "transformers' AutoModelForCausalLM makes no model of its text configuration"

# In transformers' table, but no decoders that answer a text with text on their own.
NOT_TEXT_DECODERS: dict[str, str] = {
    "emu3": _OF_ITS_TEXT_MODEL,
    "mllama": _OF_ITS_TEXT_MODEL,
    "gemma3n": "needs timm and an image tower; its text decoder is gemma3n_text",
    "dots3_note": "needs an audio tower; its text decoder is dots3_note_text",
    "gemma4_assistant": _DRAFTS,
    "gemma4_unified_assistant": _DRAFTS,
    "moshi": _SOUNDS,
    "musicgen": _SOUNDS,
    "musicgen_melody": _SOUNDS,
    "whisper": "reads sounds; its decoder attends to an encoder",
}


def causal_lm_types() -> list[str]:
    """Return all model types for which transformers has a causal language model."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
