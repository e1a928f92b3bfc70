"""Check of a side's tokens. A side with wrong tokens gets no speed.

The reference is transformers in float32 (``peers/truth.py``). A token other than its most likely one is a tie if its
logit is within a tolerance of the best, under teacher forcing of the side's own tokens, so that tokens after a tie are
checked, too. The tolerance is in standard deviations of the logits at that token. The best token of a random model is
about four of them above a random one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from .....shared.errors import ConfigurationError
from ..workload import Item

# What float32 leaves between two orders of summing, and what bfloat16 does over thirty layers (measured: 0.04). Weights
# and inputs in bytes move each logit of a random model of thirty layers by 0.13 standard deviations, computed exactly:
# a token's gap is above 0.29 once in a hundred, and once in a few thousand above 0.5, on any processor.
#
# Four bits move it by 0.77, so that a random model says other tokens: of 600, 1.3 standard deviations below the best on
# average and 3.9 at most. A random token lies 4 below, give or take 1: some of a few dozen are still found out.
TOLERANCE = {"float32": 0.001, "bfloat16": 0.25, "int8": 1.0, "int4-mixed": 5.0, "int4": 5.0}
_TRUTH = Path(__file__).parents[1] / "peers" / "truth.py"


class Claim(msgspec.Struct):
    """Tokens of a side for a request; ``request`` is its index among the requests of the question."""

    request: int
    token_ids: list[int]


class ReferenceRun(msgspec.Struct):
    """Results of the reference: its own tokens by request, and each side's gaps by claim and token."""

    tokens: list[list[int]]
    gaps: dict[str, list[list[float]]]
    versions: dict[str, str] = {}


class Verdict(msgspec.Struct, kw_only=True):
    """Verdict on one side. ``wrong`` describes its errors, "" for none; ``precision`` is the key of its tolerance."""

    precision: str
    num_requests: int = 0
    num_identical: int = 0
    largest_gap: float = 0.0
    wrong: str = ""


def ask_truth(
    model: Path, items: Sequence[Item], claims: Mapping[str, Sequence[Claim]], scratch: Path, *, generates: bool
) -> ReferenceRun:
    """Have transformers compute in float32, in a process of its own: its own tokens too, if it ``generates``.

    Raises:
        ConfigurationError: it failed; the message has its words.
    """
    requests = [
        {"prompt_token_ids": item.prompt_token_ids, "max_tokens": item.max_tokens if generates else 0} for item in items
    ]
    question = {"model": str(model), "requests": requests, "claims": claims}
    question_file, answer_file = scratch / "question.json", scratch / "answer.json"
    question_file.write_bytes(msgspec.json.encode(question))
    command = [sys.executable, str(_TRUTH), "--input", str(question_file), "--output", str(answer_file)]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    if completed.returncode != 0:
        raise ConfigurationError(f"transformers failed in float32: {completed.stderr.strip()}")
    return msgspec.json.decode(answer_file.read_bytes(), type=ReferenceRun)


def judge(
    claims: Sequence[Claim], gaps: Sequence[Sequence[float]], truth: Sequence[list[int]], precision: str
) -> Verdict:
    """Compare a side's claims with the reference; lists in ``truth`` are empty if it generated nothing.

    ``precision``, a key of ``TOLERANCE``, is the dtype or the quantisation of the side.
    """
    verdict = Verdict(
        precision=precision,
        num_requests=len(claims),
        num_identical=sum(claim.token_ids == truth[claim.request] for claim in claims),
        largest_gap=max((gap for of_claim in gaps for gap in of_claim), default=0.0),
    )
    tolerance = TOLERANCE[precision]
    for claim, of_claim in zip(claims, gaps, strict=True):
        for position, gap in enumerate(of_claim):
            # "not <=" so that a gap of NaN is wrong as well
            if not gap <= tolerance:
                verdict.wrong = (
                    f"token {position} of request {claim.request} lies {gap:.4f} standard deviations below the best "
                    f"of transformers in float32 ({precision} is given {tolerance:g})"
                )
                return verdict
    return verdict


def wrong_lengths(items: Sequence[Item], outputs: Sequence[Sequence[int]]) -> str:
    """Return the errors in the numbers of tokens; "" if all are as requested."""
    if len(outputs) != len(items):
        return f"{len(outputs)} outputs for {len(items)} requests"
    for index, (item, token_ids) in enumerate(zip(items, outputs, strict=True)):
        if len(token_ids) != item.max_tokens:
            return f"request {index} has {len(token_ids)} tokens, not {item.max_tokens}"
    return ""


def read_vocab_size(model: Path) -> int:
    """Return the size of a model's vocabulary."""
    return json.loads((model / "config.json").read_text())["vocab_size"]
