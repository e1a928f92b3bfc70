"""Cuts of prompts with images whose tokens see each other, and the tokens that each token sees."""

from __future__ import annotations

import random

from penstock.shared.params.sampling import SamplingParams
from penstock.worker.engine.scheduling.block_pool import BlockPool
from penstock.worker.engine.scheduling.prefix_cache import BlockHashCache
from penstock.worker.engine.scheduling.prompt_inputs import ImageSpan, last_cut, uncut_hit
from penstock.worker.engine.scheduling.request import Request, RequestStatus
from penstock.worker.engine.scheduling.scheduler import Scheduler
from penstock.worker.engine.scheduling.scheduler_output import SampledTokens, SchedulerOutput

BLOCK_SIZE = 4
LONGEST = 6
MAX_NUM_SEQS = 3
# The fewest with which the first of three that run can always compute an image.
BUDGET = LONGEST + MAX_NUM_SEQS - 1


def span(*bidirectional: tuple[int, int], key: bytes = b"k") -> ImageSpan:
    return ImageSpan(bidirectional[0][0] - 1, bidirectional[-1][1] + 1, [], key, None, bidirectional=bidirectional)


def request(name: str, num_tokens: int, *images: ImageSpan, num_new_tokens: int = 4) -> Request:
    params = SamplingParams(max_tokens=num_new_tokens, ignore_eos=True)
    return Request(name, list(range(num_tokens)), params, max_model_len=64, images=images)


def make_scheduler(num_blocks: int = 32) -> Scheduler:
    pool = BlockPool(num_blocks, BLOCK_SIZE)
    return Scheduler(
        pool, max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=BUDGET, max_model_len=64,
        prefix_cache=BlockHashCache(pool),
    )  # fmt: skip


def compute(scheduler: Scheduler, output: SchedulerOutput) -> None:
    """Chunks end where they may; each request that catches up says 7."""
    for one, num_new_tokens in output.work():
        end = one.num_computed_tokens + num_new_tokens
        for image in one.images:
            for first, stop in image.bidirectional:
                assert not first < end < stop, f"{one.request_id} is cut at {end}"
                assert not first < one.num_computed_tokens < stop, f"{one.request_id} begins within an image"
    token_ids = [[7] if n == r.num_uncomputed_tokens else [] for r, n in output.work()]
    scheduler.update_from_output(output, SampledTokens(token_ids))
    scheduler.check_invariants()


def test_no_chunk_ends_within_an_image_and_all_requests_finish() -> None:
    """Requests drawn at random, in a KV cache too small for all that run: with preemptions, and blocks found again."""
    draw = random.Random(0)
    num_preemptions = num_hits = 0
    for _ in range(40):
        scheduler = make_scheduler(num_blocks=18)
        requests = []
        for number in range(6):
            first = draw.randrange(2, 9)
            second = first + 8 + draw.randrange(0, 6)
            images = span((first, first + LONGEST)), span((second, second + draw.randrange(1, 7)))
            requests.append(request(str(number), draw.randrange(second + 9, 48), *images, num_new_tokens=9))
            scheduler.add_request(requests[-1])
        for _ in range(300):
            if not scheduler.has_unfinished_requests:
                break
            output = scheduler.schedule()
            assert output.requests, "nobody moves"
            compute(scheduler, output)
        assert {one.status for one in requests} == {RequestStatus.FINISHED_LENGTH_CAPPED}
        num_preemptions += scheduler.stats().num_preemptions
        num_hits += scheduler.stats().prefix_cache_hits
    assert num_preemptions > 0
    assert num_hits > 0


def test_an_image_waits_for_a_step_with_capacity_while_others_continue() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(request("text", 12))
    scheduler.add_request(request("image", 9, span((1, 7))))
    # The first takes the whole step; then four tokens, which leaves too few for the image behind one token of text.
    work = []
    for _ in range(4):
        output = scheduler.schedule()
        work.append({one.request_id: num for one, num in output.work()})
        compute(scheduler, output)
    assert work == [{"text": 8}, {"text": 4, "image": 1}, {"text": 1, "image": 7}, {"text": 1, "image": 1}]


def test_a_prompt_may_be_cut_at_both_ends_of_an_image() -> None:
    images = [span((3, 9)), span((12, 14), (20, 22))]
    cuts = [last_cut(images, num) for num in range(24)]
    assert [num for num in range(24) if cuts[num] != num] == [*range(4, 9), 13, 21]
    assert (set(cuts[4:9]), cuts[13], cuts[21]) == ({3}, 12, 20)
    # Blocks of four: the second ends within the first image, and so does the rest of it.
    assert [uncut_hit(images, num, 4) for num in range(6)] == [0, 0, 0, 3, 4, 5]


def test_blocks_that_another_left_count_up_to_the_image_that_they_cut() -> None:
    scheduler = make_scheduler()
    first, second = (request(name, 20, span((9, 15)), num_new_tokens=1) for name in "ab")
    second.token_ids[17] = 99
    for one, expected in ((first, 0), (second, 16)):
        scheduler.add_request(one)
        while scheduler.has_unfinished_requests:
            compute(scheduler, scheduler.schedule())
        assert one.num_cached_tokens == expected
    third = request("c", 20, span((9, 15)), num_new_tokens=1)
    third.token_ids[15] = 99  # which the block has that begins within the image
    scheduler.add_request(third)
    compute(scheduler, scheduler.schedule())
    assert third.num_cached_tokens == 8
