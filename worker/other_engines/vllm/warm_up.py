"""Has vLLM do once, before an engine is ready, what it imports and compiles at its first use.

At a request's first step that would look like a hang: ranks of log probabilities are compiled, for one request and for
several, and the libraries of grammars are imported when the first grammar comes.
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
    """Run a few tiny requests to their ends; one that vLLM refuses, such as grammars of some tokenizers, is told."""
    for batch in _BATCHES:
        for number, params in enumerate(batch):
            request = EngineCoreRequest(request_id=f"warm-up-{number}", prompt_token_ids=[0, 0], sampling_params=params)
            refused = core.add_request(request)
            if refused is not None and refused.error is not None:
                log.warning("warm_up_refused", reason=refused.error.message)
        while core.has_work:
            core.step_fn()
    core.forget_warm_up()
