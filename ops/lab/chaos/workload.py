"""The requests of a chaos run: every kind of end and of randomness, each with one right answer.

Seeds are fixed here, so a request has one output whatever happens to the engines that run it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from random import Random

import msgspec

from ....producer import SamplingParams
from ...demo.task import demo_questions

# Half of the requests are of one of these.
SESSIONS = ("a", None, "b", None, "c", None)


class ChaosRequest(msgspec.Struct, frozen=True):
    """A request. ``is_detached`` requests are submitted, and read in pieces by readers that connect and disconnect.

    The first reader of those with ``loses_reader`` is a process that is killed. Some have a ``session_id``, so that
    they wait for an engine, which may be the next to die. ``model`` is None for the only served model.
    """

    prompt: str
    params: SamplingParams
    is_detached: bool
    session_id: str | None = None
    model: str | None = None
    tenant: str = "default"
    loses_reader: bool = False


# One of so many detached requests loses its first reader: each costs the start of a program.
DETACHED_PER_LOST_READER = 4


def make_requests(
    count: int, seed: int, models: Sequence[str | None] = (None,), tenants: Sequence[str] = ("default",)
) -> list[ChaosRequest]:
    """Draw ``count`` requests: greedy and seeded, long and short, with stop strings and minimum lengths.

    Each model is asked in turn, and each tenant asks each in turn.
    """
    random, detached = Random(seed), itertools.count()
    kinds = [
        lambda: SamplingParams(temperature=0.0, max_tokens=64),
        lambda: SamplingParams(temperature=0.0, max_tokens=random.randint(16, 96), ignore_eos=True),
        lambda: SamplingParams(temperature=1.0, seed=random.getrandbits(40), max_tokens=96, ignore_eos=True),
        lambda: SamplingParams(temperature=0.8, top_p=0.9, seed=random.getrandbits(40), max_tokens=64, min_tokens=40),
        lambda: SamplingParams(
            temperature=1.2, top_k=20, seed=random.getrandbits(40), max_tokens=96, stop=["teen", "."]
        ),
    ]
    return [
        ChaosRequest(
            question.prompt,
            random.choice(kinds)(),
            is_detached := random.random() < 0.3,
            session_id=SESSIONS[number % len(SESSIONS)],
            model=models[number % len(models)],
            tenant=tenants[number // len(models) % len(tenants)],
            loses_reader=is_detached and next(detached) % DETACHED_PER_LOST_READER == 0,
        )
        for number, question in enumerate(demo_questions(count, seed))
    ]
