"""Random requests with random features for a soak: each with a check of what came out."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from penstock.shared.messages.core import EngineCoreOutput
from penstock.shared.messages.outcome import FinishReason, TokenLogprobs
from penstock.shared.messages.requests import EngineCoreRequest
from penstock.shared.params.prompts import PromptEmbeds
from penstock.shared.params.sampling import RepetitionDetectionParams, SamplingParams
from penstock.shared.params.structured import StructuredOutputsParams

MAX_MODEL_LEN = 128
SCHEMA = {
    "type": "object",
    "properties": {"hot": {"type": "boolean"}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["hot", "n"],
    "additionalProperties": False,
}
THINK_TOKEN_IDS = (20, 21)


@dataclass
class Whole:
    """All that came out of one request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    end: EngineCoreOutput | None = None

    def take(self, output: EngineCoreOutput) -> None:
        assert self.end is None, "something came after the end"
        self.token_ids += output.new_token_ids
        self.logprobs += output.new_logprobs
        self.prompt_logprobs += output.new_prompt_logprobs
        if output.finished:
            self.end = output


Check = Callable[[Whole], object]


@dataclass
class Case:
    """A request of some kind, and what must hold of its outcome unless it was aborted."""

    kind: str
    request: EngineCoreRequest
    checks: list[Check]

    def check(self, whole: Whole) -> None:
        assert whole.end is not None
        assert whole.end.error is None, whole.end.error
        params = self.request.sampling_params
        assert params is not None
        num_before = len(self.request.output_token_ids or ())
        num_output, reason = num_before + len(whole.token_ids), whole.end.finish_reason
        assert num_output <= (params.max_tokens or MAX_MODEL_LEN)
        assert reason is not FinishReason.LENGTH or num_output == params.max_tokens
        for check in self.checks:
            assert check(whole), (params, whole.end, whole.token_ids)


Trait = Callable[[random.Random], tuple[dict[str, Any], Check]]


def _chance(rng: random.Random) -> tuple[dict[str, Any], Check]:
    fields = {"temperature": rng.choice([0.0, 0.7, 1.5]), "top_p": rng.choice([1.0, 0.8]), "seed": rng.getrandbits(30)}
    return fields | {"top_k": rng.choice([0, 5]), "min_p": rng.choice([0.0, 0.1])}, lambda whole: True


def _penalties(rng: random.Random) -> tuple[dict[str, Any], Check]:
    return {"presence_penalty": 0.5, "frequency_penalty": -0.25, "repetition_penalty": 1.2}, lambda whole: True


def _logprobs(rng: random.Random) -> tuple[dict[str, Any], Check]:
    num_top = rng.randrange(4)
    return (
        {"logprobs": num_top},
        lambda whole: (
            [told.token_id for told in whole.logprobs] == whole.token_ids
            and all(len(told.top) == num_top and told.logprob <= 0 for told in whole.logprobs)
        ),
    )


def _allowed(rng: random.Random) -> tuple[dict[str, Any], Check]:
    # An even one at least: what other rules forbid is odd, so they never forbid all.
    allowed = [rng.randrange(30, 300, 2), *rng.sample(range(30, 300), rng.randint(0, 19))]
    return {"allowed_token_ids": allowed}, lambda whole: set(whole.token_ids) <= set(allowed)


def _bias(rng: random.Random) -> tuple[dict[str, Any], Check]:
    banned = rng.sample(range(31, 300, 2), 9)
    return {"logit_bias": dict.fromkeys(banned, -100.0)}, lambda whole: not set(whole.token_ids) & set(banned)


def _bad_words(rng: random.Random) -> tuple[dict[str, Any], Check]:
    pairs = [[rng.randrange(30, 60), rng.randrange(31, 60, 2)] for _ in range(5)] + [[rng.randrange(31, 300, 2)]]
    return (
        {"bad_words_token_ids": pairs},
        lambda whole: (
            not any(whole.token_ids[i : i + len(word)] == word for word in pairs for i in range(len(whole.token_ids)))
        ),
    )


def _stops(rng: random.Random) -> tuple[dict[str, Any], Check]:
    stops = rng.sample(range(30, 300), 40)
    return (
        {"stop_token_ids": stops, "min_tokens": 2},
        lambda whole: (
            not set(whole.token_ids[:-1]) & set(stops)
            and (whole.token_ids[-1] not in stops or whole.end is None or whole.end.stop_reason == whole.token_ids[-1])
        ),
    )


def _thinking(rng: random.Random) -> tuple[dict[str, Any], Check]:
    fields = {"thinking_token_budget": 3, "think_token_ids": THINK_TOKEN_IDS}
    return fields, lambda whole: _thinks_at_most(whole.token_ids, 3)


def _thinks_at_most(token_ids: list[int], budget: int) -> bool:
    start, end = THINK_TOKEN_IDS
    if start not in token_ids:
        return True
    thoughts = token_ids[token_ids.index(start) + 1 :]
    return len(thoughts) <= budget or end in thoughts[: budget + 1]


def _repetition(rng: random.Random) -> tuple[dict[str, Any], Check]:
    wanted = RepetitionDetectionParams(max_pattern_size=2, min_pattern_size=1, min_count=3)
    return {
        "repetition_detection": wanted
    }, lambda whole: not any(len(set(whole.token_ids[i : i + 3])) == 1 for i in range(len(whole.token_ids) - 3))


FREE_TRAITS: tuple[Trait, ...] = (
    _chance,
    _penalties,
    _logprobs,
    _allowed,
    _bias,
    _bad_words,
    _stops,
    _thinking,
    _repetition,
)


def free_case(rng: random.Random, request_id: str, prefixes: list[list[int]]) -> Case:
    """A random prompt, some of whose beginnings are shared, and any mix of traits that can be together."""
    prompt = rng.choice(prefixes)[: rng.randint(1, 60)] + [rng.randrange(3, 300) for _ in range(rng.randint(1, 20))]
    fields: dict[str, Any] = {"max_tokens": rng.randint(3, 40), "ignore_eos": rng.random() < 0.5}
    checks: list[Check] = []
    traits = rng.sample(FREE_TRAITS, rng.randint(0, 5))
    if _allowed in traits:  # what is allowed may all be forbidden by these
        traits = [trait for trait in traits if trait not in (_bad_words, _stops, _thinking)]
    for trait in traits:
        chosen, check = trait(rng)
        fields |= chosen
        checks.append(check)
    if rng.random() < 0.2:
        fields["prompt_logprobs"] = 1
        checks.append(lambda whole: [told.token_id for told in whole.prompt_logprobs] == prompt[1:])
    return Case("free", _request(rng, request_id, prompt, fields), checks)


def structured_case(rng: random.Random, request_id: str, decode: Callable[[list[int]], str]) -> Case:
    """A random answer that has to follow a schema or a regex."""

    def text(whole: Whole) -> str:
        return decode([token_id for token_id in whole.token_ids if token_id > 2])

    def is_of_the_schema(whole: Whole) -> bool:
        if whole.end is not None and whole.end.finish_reason is FinishReason.LENGTH:
            return True
        told = json.loads(text(whole))
        return set(told) == {"hot", "n"} and isinstance(told["hot"], bool) and 0 <= told["n"] <= 99

    if rng.random() < 0.5:
        wanted, check = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True), is_of_the_schema
    else:
        pattern = f"[ab]{{2}}{rng.randrange(10)}[0-9]+x"
        wanted = StructuredOutputsParams(regex=pattern)

        def check(whole: Whole) -> bool:
            is_cut = whole.end is not None and whole.end.finish_reason is FinishReason.LENGTH
            return is_cut or re.fullmatch(pattern, text(whole)) is not None

    fields = {"max_tokens": 50, "temperature": 1.0, "seed": rng.getrandbits(30), "structured_outputs": wanted}
    return Case("structured", _request(rng, request_id, [5, 6, 7], fields), [check])


def known_case(
    rng: random.Random, request_id: str, prompt: list[int], answer: list[int], embeds: PromptEmbeds | None = None
) -> Case:
    """A question whose answer is known, from the start or where another engine left it, by tokens or ``embeds``."""
    delivered = answer[: rng.randrange(len(answer))] if rng.random() < 0.5 else []
    request = _request(rng, request_id, prompt, {"temperature": 0.0, "max_tokens": 64}, delivered)
    if embeds is not None:
        request.prompt_token_ids, request.prompt_embeds = None, embeds
    kind = "known" if embeds is None else "known by embeddings"
    return Case(kind, request, [lambda whole: delivered + whole.token_ids == answer])


def _request(
    rng: random.Random, request_id: str, prompt: list[int], fields: dict[str, Any], delivered: list[int] | None = None
) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(**fields),
        output_token_ids=delivered or None,
        priority=rng.randrange(3),
        tenant=rng.choice(["a", "b"]),
        cache_salt=rng.choice([None, None, "salt"]),
    )
