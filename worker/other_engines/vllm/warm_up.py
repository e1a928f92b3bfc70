"""Trigger vLLM's lazy imports and compilations before an engine is ready.

During the first step of a request they would look like a hang: vLLM compiles ranks of log probabilities, for one
request and for several, and imports the grammar libraries at the first grammar.
"""

from __future__ import annotations

import structlog

from ....shared.messages.requests import EngineCoreRequest
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
_BATCHES = ([_SAMPLED], [_SAMPLED, _SAMPLED], [_GRAMMAR])


def warm_up(core: VllmCore) -> None:
    """Run a few tiny requests to their ends. Log those that vLLM refuses, such as grammars with some tokenizers."""
    for batch in _BATCHES:
        for number, params in enumerate(batch):
            request = EngineCoreRequest(request_id=f"warm-up-{number}", prompt_token_ids=[0, 0], sampling_params=params)
            refusal = core.add_request(request)
            if refusal is not None and refusal.error is not None:
                log.warning("warm_up_refused", reason=refusal.error.message)
        while core.has_work:
            core.step_fn()
    core.forget_warm_up()
