"""Requests of models that compute a lone token otherwise than several are cut where their results do not change."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.shared.params.sampling import SamplingParams
from penstock.worker.engine.scheduling.block_pool import BlockPool
from penstock.worker.engine.scheduling.chunking import GeneratedTokensAlone
from penstock.worker.engine.scheduling.request import Request
from penstock.worker.engine.scheduling.scheduler import Scheduler
from penstock.worker.engine.scheduling.scheduler_output import SampledTokens, SchedulerOutput

MAX_MODEL_LEN = 24

# (step of its arrival, tokens of its prompt, tokens that a former engine has delivered).
arrivals = st.tuples(st.integers(0, 12), st.integers(1, MAX_MODEL_LEN - 8), st.integers(0, 6))


@given(
    load=st.lists(arrivals, min_size=1, max_size=8),
    num_blocks=st.integers(MAX_MODEL_LEN // 4, 20),
    max_num_seqs=st.integers(1, 6),
    extra_budget=st.integers(0, 12),
)
@settings(max_examples=200, deadline=None)
def test_tokens_are_computed_in_chunks_of_their_kind(
    load: list[tuple[int, int, int]], num_blocks: int, max_num_seqs: int, extra_budget: int
) -> None:
    """With any budget, and preemption in a small cache; and every request ends."""
    scheduler = Scheduler(
        BlockPool(num_blocks, 4),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(GeneratedTokensAlone.MIN_BUDGET, max_num_seqs) + extra_budget,
        max_model_len=MAX_MODEL_LEN,
        chunking=GeneratedTokensAlone(),
    )
    step = 0
    while step <= 12 or scheduler.has_unfinished_requests:
        assert step < 2000
        for index, (arrival_step, num_prompt_tokens, num_delivered) in enumerate(load):
            if arrival_step == step:
                scheduler.add_request(
                    Request(
                        str(index),
                        [1] * num_prompt_tokens,
                        SamplingParams(max_tokens=8),
                        max_model_len=MAX_MODEL_LEN,
                        output_token_ids=[100] * num_delivered,
                    )
                )
        output = scheduler.schedule()
        assert output.requests or not scheduler.has_unfinished_requests
        for request, num_new_tokens in zip(output.requests, output.num_new_tokens, strict=True):
            check_chunk(request, num_new_tokens)
        scheduler.update_from_output(output, compute(output))
        scheduler.check_invariants()
        step += 1


def check_chunk(request: Request, num_new_tokens: int) -> None:
    num_lacking = request.num_prompt_tokens - request.num_computed_tokens
    assert num_new_tokens >= 1
    if num_lacking <= 0:
        assert num_new_tokens == 1, "generated tokens were computed together"
    else:
        assert num_new_tokens <= num_lacking, "a chunk has tokens of both kinds"
        assert num_new_tokens > 1 or request.num_computed_tokens == 0, "a lone token of a prompt follows a state"


def compute(output: SchedulerOutput) -> SampledTokens:
    rows = zip(output.requests, output.num_new_tokens, strict=True)
    return SampledTokens([[100] if request.num_uncomputed_tokens == num_new else [] for request, num_new in rows])
