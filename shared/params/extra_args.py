"""``extra_args`` of ``SamplingParams``: names the operator's logits processors that a request uses.

SamplingParams(extra_args={"logits_processors": {"ban": {"token_ids": [5]}}})
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from ..errors import UnsupportedParameterError, ValidationError
from ..values.encodable import check_text
from ..values.shown import shown

LOGITS_PROCESSORS = "logits_processors"
MAX_PROCESSORS = 16


def processors_of(extra_args: dict[str, Any] | None) -> dict[str, dict[str, Any]]:
    """Return the arguments of each selected processor by name, in the order in which they apply."""
    return {} if extra_args is None else extra_args.get(LOGITS_PROCESSORS, {})


def check_extra_args(extra_args: Any, field: str = "extra_args") -> None:
    """Refuse anything but a selection of processors; ``field`` is the caller's name of it.

    Raises:
        UnsupportedParameterError: there is something else in it.
        ValidationError: they are not named with arguments each, or too many.
    """
    if not isinstance(extra_args, dict) or set(extra_args) != {LOGITS_PROCESSORS}:
        raise UnsupportedParameterError(
            f"{field}={shown(extra_args)} is not supported: it may have {LOGITS_PROCESSORS} alone; leave it at None"
        )
    selection = extra_args[LOGITS_PROCESSORS]
    is_named = isinstance(selection, dict) and all(
        isinstance(name, str) and isinstance(args, dict) for name, args in selection.items()
    )
    if not is_named:
        raise ValidationError(
            f"{field}.{LOGITS_PROCESSORS} must map names to dicts of arguments, got {shown(selection)}"
        )
    if len(selection) > MAX_PROCESSORS:
        raise ValidationError(
            f"{field}.{LOGITS_PROCESSORS} must name at most {MAX_PROCESSORS} processors, got {len(selection)}"
        )
    for name in selection:
        check_text(f"a name of {field}.{LOGITS_PROCESSORS}", name)


def check_known(extra_args: dict[str, Any] | None, known: Collection[str]) -> None:
    """Raise ``UnsupportedParameterError`` if a selected processor is not in ``known``, those of the engine."""
    for name in processors_of(extra_args):
        if name not in known:
            available = f"those there are: {', '.join(sorted(known))}" if known else "it has none"
            raise UnsupportedParameterError(
                f"extra_args.{LOGITS_PROCESSORS}: the model's engines have no processor {shown(name)}; {available}. "
                "The operator names them by worker start --logits-processors"
            )
