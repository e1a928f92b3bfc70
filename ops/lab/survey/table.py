"""The outcomes of the model types as a Markdown page."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import transformers

from .images.models import NOT_TRIED
from .outcome import ONE_A_REQUEST, SAME, WAYS, WAYS_WITH_IMAGES, Outcome

_MAX_REASON_CHARS = 700


def page(
    outcomes: list[Outcome],
    skipped: dict[str, str],
    options: str = "",
    seeing: Sequence[Outcome] = (),
    num_untried: int = 0,
) -> str:
    """Return the page of ``make models``: counts, a row per model type, then types tried with images.

    Args:
        options: a sentence about options of the engines.
        num_untried: number of types not tried yet.
    """
    untried = f" {num_untried} more were not tried yet." if num_untried else ""
    identical = [outcome for outcome in outcomes if outcome.is_identical]
    modes = Counter(outcome.mode for outcome in identical)
    modes_text = ", ".join(f"{count} {mode}" for mode, count in modes.most_common())
    rows = sorted([_row(outcome) for outcome in outcomes] + [_skipped(*item) for item in skipped.items()])
    return "\n".join(
        [
            "# Model types",
            "",
            f"Of {len(outcomes)} text decoders in transformers' table of causal language models, **{len(identical)}** "
            f"give the tokens of transformers' own `generate` in every way tried: {modes_text}. The table has "
            f"{len(skipped)} other types, which are no text decoders.{untried}",
            "",
            f"Made by `make models` with transformers {transformers.__version__}, torch {torch.__version__}, Python "
            f"{platform.python_version()}, in float32 on one thread of a CPU.{options}",
            "",
            *_METHOD,
            "",
            f"| model type | mode | {' | '.join(WAYS)} | reason |",
            "|---" * (len(WAYS) + 3) + "|",
            *rows,
            "",
            *(_of_images(seeing) if seeing else ()),
        ]
    )


def describe_options(options: dict[str, Any]) -> str:
    """Return a sentence about options of ``EngineConfig``; "" if there are none."""
    text = ", ".join(f"`{name}` {value}" for name, value in options.items())
    return f" Each engine has {text}: ranks are processes, which talk by gloo." if text else ""


def _of_images(outcomes: Sequence[Outcome]) -> list[str]:
    is_good = {SAME, ONE_A_REQUEST}
    num_same = sum(len(one.told) == len(WAYS_WITH_IMAGES) and {*one.told.values()} <= is_good for one in outcomes)
    return [
        "## With images",
        "",
        f"**{num_same}** of {len(outcomes)} give the tokens of transformers' own `generate` with images, in every way "
        "tried.",
        "",
        *_METHOD_WITH_IMAGES,
        "",
        f"| model type | mode | {' | '.join(WAYS_WITH_IMAGES)} | reason |",
        "|---" * (len(WAYS_WITH_IMAGES) + 3) + "|",
        *sorted(_row(outcome, WAYS_WITH_IMAGES) for outcome in outcomes),
        *sorted(_skipped(*item, WAYS_WITH_IMAGES) for item in NOT_TRIED.items()),
        "",
    ]


_METHOD = (
    "Each type is tried with a small random model (`ops/lab/survey/`), loaded and run by the engine's own code. "
    "Six prompts of 1 to 40 tokens get 16 greedy tokens each: every prompt *alone*; all *mixed* in one batch; "
    "*chunked*, with 8 tokens a step; and with a KV cache for little more than one of them, so that they are "
    '*preempted* and computed again ("never": the model has no keys and values, so nobody is). Every token has to be '
    "that of transformers, which computes each prompt alone. Models that read images or sounds too get text alone; "
    "encoders such as BERT are made decoders (`is_decoder`); of encoder-decoders the decoder is tried.",
    "",
    "Weights are drawn again, up to four times, while one of transformers' choices leads by less than 1e-4 of the "
    "largest logit (rounding is about 1e-6) or a model says fewer than 8 different tokens. So no near-tie has to be "
    "passed over in the comparison. *packed*, *split* and *gather* are explained in "
    "[modes](../../decisions/modes.md), *lean* in [lean plan](../../decisions/lean_plan.md).",
)


_METHOD_WITH_IMAGES = (
    "Each is a small random model with small pictures (`ops/lab/survey/images/`). A prompt with *one* image, and one "
    "with *two* of other sizes, each alone, get 12 greedy tokens; then three prompts *mixed* in one batch; *chunked*, "
    "with 7 tokens a step, so that chunks end inside of images (with 21 where no chunk may, so that they end before "
    "them); *preempted*; and *resumed* behind their first five tokens, by an engine that has not seen the images. "
    "*One a request*: a second image is refused, since the model's processor makes something else of several.",
)


def _row(outcome: Outcome, ways: Sequence[str] = WAYS) -> str:
    cells = " | ".join(outcome.told.get(way, "") for way in ways)
    reason = outcome.reason.replace("|", "/").replace("\n", " ")
    if len(reason) > _MAX_REASON_CHARS:
        reason = reason[:_MAX_REASON_CHARS] + " …"
    return f"| {outcome.model_type} | {outcome.mode} | {cells} | {reason} |"


def _skipped(model_type: str, reason: str, ways: Sequence[str] = WAYS) -> str:
    return f"| {model_type} | {'| ' * len(ways)}| not tried: {reason} |"
