"""Names of layers in adapters of models that read images.

Such an adapter was trained on the whole model, where the part that speaks lies in another; engines compute that part by
itself. So its layers have longer names in the adapter than in the engine, and those of what sees have none.
"""

from __future__ import annotations

from collections.abc import Container

from ....shared.adapter_errors import UnsupportedAdapterError

# Where the part that speaks lies: as transformers has it, as it had it before 4.52, and in Idefics3 and its kin.
_TEXT_PARTS = ("model.language_model.", "language_model.model.", "model.text_model.")
_ALONE = "model."
# What is in the names of parts that see.
_SEEING_PARTS = ("vision", "visual", "projector", "connector", "merger", "resampler")


def own_name(layer: str, layers: Container[str]) -> str:
    """Return the name among ``layers`` of what an adapter calls ``layer``; ``layer`` itself if there is none."""
    if layer in layers:
        return layer
    alone = (_ALONE + layer.removeprefix(part) for part in _TEXT_PARTS if layer.startswith(part))
    return next((name for name in alone if name in layers), layer)


def refuse_seeing_part(layer: str) -> None:
    """Raise, if ``layer``, which an engine does not know, is of a part that sees.

    Raises:
        UnsupportedAdapterError: it is.
    """
    if any(part in segment for segment in layer.split(".")[:-1] for part in _SEEING_PARTS):
        raise UnsupportedAdapterError(
            f"the adapter changes {layer!r}, which reads images; only the text model's layers are adapted here: train "
            r"with target_modules that name no others, as '.*(language_model|text_model).*\.(q_proj|v_proj)', or merge "
            "the adapter into the model"
        )
