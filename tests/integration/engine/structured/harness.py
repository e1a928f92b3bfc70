"""Requests with grammars, and running them."""

from __future__ import annotations

import zlib
from typing import Any

from penstock.shared.messages.core import EngineCoreOutput
from penstock.shared.messages.requests import EngineCoreRequest
from penstock.shared.params.sampling import SamplingParams
from penstock.shared.params.structured import StructuredOutputsParams
from penstock.worker.engine.core.engine_core import EngineCore

MAX_TOKENS = 500


def ask(request_id: str, grammar: dict[str, Any] | None, output: list[int] | None = None, **params: Any) -> Any:
    constrained = None if grammar is None else StructuredOutputsParams(**grammar)
    given = {"temperature": 1.0, "max_tokens": MAX_TOKENS, "seed": zlib.crc32(request_id.encode()), **params}
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=[1, *(3 + len(request_id) * i % 200 for i in range(1, 8))],
        sampling_params=SamplingParams(**given, structured_outputs=constrained),
        output_token_ids=output,
    )


def run(core: EngineCore, requests: list[EngineCoreRequest]) -> dict[str, EngineCoreOutput]:
    """Run requests together to their end; all that each was given."""
    wholes = {r.request_id: EngineCoreOutput(r.request_id) for r in requests}
    outputs = [refused for r in requests if (refused := core.add_request(r)) is not None]
    while outputs or core.has_work:
        for output in outputs:
            whole = wholes[output.request_id]
            whole.new_token_ids = whole.new_token_ids + output.new_token_ids
            whole.finish_reason, whole.stop_reason, whole.error = (
                output.finish_reason,
                output.stop_reason,
                output.error,
            )
        outputs = core.step_fn() if core.has_work else []
    core.check_invariants()
    return wholes
