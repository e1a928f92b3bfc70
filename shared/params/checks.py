"""Checks of single request parameters; each error has the field, its value, and the allowed values."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

from ..errors import UnsupportedParameterError, ValidationError
from ..values.checks import check_text
from ..values.shown import shown

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
# With as many, each step takes 0.5 ms longer for each such request (one core; vLLM stops at 1,024).
MAX_LISTED_TOKEN_IDS = 16_384
MAX_LOGIT_BIAS = 100.0
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_CHARS = 256
LOGITS_PROCESSORS = "logits_processors"
MAX_PROCESSORS = 16


def check_number(name: str, value: Any, kind: type, low: float, high: float) -> None:
    """Check a number of ``kind`` in ``[low, high]``; an integer is a valid float."""
    accepted = (int, float) if kind is float else (int,)
    if isinstance(value, bool) or not isinstance(value, accepted):
        expected = "a number" if kind is float else "an integer"
        raise ValidationError(f"{name} must be {expected} in [{_bound(low)}, {_bound(high)}], got {shown(value)}")
    if not math.isfinite(value) or not low <= value <= high:
        raise ValidationError(f"{name} must be in [{_bound(low)}, {_bound(high)}], got {shown(value)}")


def _bound(value: float) -> str:
    """Return a bound in words: 1048576, not 1.04858e+06."""
    return f"{value:.0f}" if abs(value) < 1e9 and value == int(value) else f"{value:g}"


def check_stop(stop: Any, *, detokenize: bool) -> None:
    """Check a string or a list of strings, none of them empty."""
    strings = [stop] if isinstance(stop, str) else stop
    if not _are_strings(strings):
        raise ValidationError(f"stop must be a non-empty string or a list of such strings, got {shown(stop)}")
    _check_texts("stop", strings)
    if len(strings) > MAX_STOP_STRINGS:
        raise ValidationError(f"stop must hold at most {MAX_STOP_STRINGS} strings, got {len(strings)}")
    longest = max((len(s) for s in strings), default=0)
    if longest > MAX_STOP_STRING_CHARS:
        raise ValidationError(f"stop strings must have at most {MAX_STOP_STRING_CHARS} characters, got {longest}")
    if strings and not detokenize:
        raise ValidationError("stop needs detokenize=True, got detokenize=False")


def check_bad_words(words: Any) -> None:
    """Check a list of strings, none of them empty."""
    if not isinstance(words, list | tuple) or not _are_strings(words):
        raise ValidationError(f"bad_words must be a list of non-empty strings, got {shown(words)}")
    _check_texts("bad_words", words)
    if len(words) > MAX_BAD_WORDS:
        raise ValidationError(f"bad_words must hold at most {MAX_BAD_WORDS} words, got {len(words)}")
    longest = max((len(word) for word in words), default=0)
    if longest > MAX_BAD_WORD_CHARS:
        raise ValidationError(f"bad_words must have at most {MAX_BAD_WORD_CHARS} characters each, got {longest}")


def check_token_ids(name: str, token_ids: Any) -> None:
    """Check a list of non-negative integers."""
    valid = isinstance(token_ids, list | tuple) and all(_is_token_id(token_id) for token_id in token_ids)
    if not valid:
        raise ValidationError(f"{name} must be a list of non-negative integers, got {shown(token_ids)}")


def check_allowed_token_ids(token_ids: Any) -> None:
    """Check a list of token ids that is neither empty nor too long."""
    check_token_ids("allowed_token_ids", token_ids)
    if not token_ids:
        raise ValidationError("allowed_token_ids must hold at least one token id, got []; None allows all")
    if len(token_ids) > MAX_LISTED_TOKEN_IDS:
        raise ValidationError(
            f"allowed_token_ids must hold at most {MAX_LISTED_TOKEN_IDS} ids, got {len(token_ids)}; "
            f"a logit_bias of -{MAX_LOGIT_BIAS:g} for the others may be shorter"
        )


def check_logit_bias(bias: Any) -> None:
    """Check a dict from token ids to numbers in [-100, 100]."""
    if not isinstance(bias, dict):
        raise ValidationError(f"logit_bias must be a dict from token ids to numbers, got {shown(bias)}")
    if len(bias) > MAX_LISTED_TOKEN_IDS:
        raise ValidationError(f"logit_bias must hold at most {MAX_LISTED_TOKEN_IDS} token ids, got {len(bias)}")
    for token_id, value in bias.items():
        if not _is_token_id(token_id):
            raise ValidationError(f"logit_bias must have non-negative integers as keys, got {shown(token_id)}")
        check_number(f"logit_bias[{token_id}]", value, float, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)


def _is_token_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _check_texts(name: str, strings: Sequence[str]) -> None:
    for position, string in enumerate(strings):
        check_text(f"{name}[{position}]", string)


def _are_strings(values: Any) -> bool:
    return isinstance(values, list | tuple) and all(isinstance(value, str) and value for value in values)


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
