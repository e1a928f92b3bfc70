"""Trigger vLLM's lazy imports and compilations before an engine is ready.

During the first step of a request they would look like a hang: vLLM compiles ranks of log probabilities, for one
request and for several, and imports the grammar libraries at the first grammar.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import structlog

from ....shared.messages.requests import EngineCoreRequest
from ....shared.params.pooling import PoolingParams
from ....shared.params.sampling import SamplingParams
from ....shared.params.structured import StructuredOutputsParams
from .core import VllmCore

log = structlog.get_logger(__name__)

_SAMPLED = SamplingParams(
    temperature=0.8,
    top_p=0.9,
    top_k=5,
    min_p=0.01,
    seed=1,
    presence_penalty=0.5,
    frequency_penalty=0.5,
    repetition_penalty=1.1,
    max_tokens=2,
    logprobs=1,
    prompt_logprobs=1,
)
_GRAMMAR = SamplingParams(temperature=0.0, max_tokens=2, structured_outputs=StructuredOutputsParams(regex="[0-9]+"))
Batch = Sequence[EngineCoreRequest]


def _tiny_request(params: SamplingParams | None, pooling: PoolingParams | None = None) -> EngineCoreRequest:
    return EngineCoreRequest(request_id="", prompt_token_ids=[0, 0], sampling_params=params, pooling_params=pooling)


def generation_batches(*, has_adapters: bool) -> list[Batch]:
    """Return a batch of one and one of two with sampling, and one with a grammar.

    Args:
        has_adapters: whether the engine serves adapters, and so no log probabilities of prompts.
    """
    params = msgspec.structs.replace(_SAMPLED, prompt_logprobs=None) if has_adapters else _SAMPLED
    sampled = _tiny_request(params)
    return [[sampled], [sampled] * 2, [_tiny_request(_GRAMMAR)]]


def pooling_batches(tasks: Sequence[str]) -> list[Batch]:
    """Return a batch of one and one of two for each of the tasks."""
    return [[_tiny_request(None, PoolingParams(task=task))] * size for task in tasks for size in (1, 2)]


def warm_up(core: VllmCore, batches: Sequence[Batch]) -> None:
    """Run a few tiny requests to their ends. Log those that vLLM refuses, such as grammars with some tokenizers."""
    for batch in batches:
        for number, request in enumerate(batch):
            refusal = core.add_request(msgspec.structs.replace(request, request_id=f"warm-up-{number}"))
            if refusal is not None and refusal.error is not None:
                log.warning("warm_up_refused", reason=refusal.error.message)
        while core.has_work:
            core.step_fn()
    core.forget_warm_up()
