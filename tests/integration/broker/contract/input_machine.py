"""Random histories of resumable requests: their input grows and closes at any time, whoever holds them or does not."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import consumes, rule

from penstock.shared import errors
from penstock.shared.broker import NEW, SegmentRecord
from penstock.shared.messages.deltas import Delta, SegmentEnd
from penstock.shared.messages.outcome import FinishReason, Usage
from penstock.shared.messages.requests import InputChunk
from penstock.shared.queue.lifecycle import RequestState

from ..conftest import TTL_MS
from .engine_machine import ENGINES, NUMBERS, EngineMachine, Holding
from .expected import BANDS, TENANTS, ExpectedRequest


class InputMachine(EngineMachine):
    """Engines end segments, and clients extend and close, once or twice."""

    @rule(number=NUMBERS, tenant=st.sampled_from(TENANTS), band=st.sampled_from(BANDS), num_tokens=st.integers(1, 9))
    def enqueue_resumable(self, number: int, tenant: str, band: str, num_tokens: int) -> None:
        request_id = f"r{number}"
        known = self.expected.requests.get(request_id)
        options = {"tenant": tenant, "band": band, "num_prompt_tokens": num_tokens, "is_resumable": True}
        work = self.broker.enqueue(request_id, b"p", result_ttl_ms=TTL_MS, max_tokens=1, **options)
        reply = self.enqueued(work, known, tenant)
        if known is None and not self.expected.is_given_up:
            assert reply == NEW
            request = ExpectedRequest("", False, tenant, band, num_tokens + 1, None, num_chunks=1)
            self.expected.add(request_id, request)

    @rule(number=NUMBERS, ahead=st.integers(-1, 1), num_tokens=st.integers(0, 9), times=st.integers(1, 2))
    def extend(self, number: int, ahead: int, num_tokens: int, times: int) -> None:
        """Extend a request, if one awaits input: by the next chunk, the one before, or one that leaves a gap."""
        awaiting = [
            request_id for request_id, r in self.expected.requests.items() if r.state is RequestState.AWAITING_INPUT
        ]
        request_id = min(awaiting, default=f"r{number}")
        request = self.expected.requests.get(request_id)
        place = (request.num_chunks if request else 1) + ahead
        chunk = InputChunk(prompt_token_ids=[place])
        for _ in range(times):
            work = self.broker.input.extend(request_id, place, chunk, num_prompt_tokens=num_tokens, max_tokens=1)
            if request is None or request.num_chunks == 0 or place == 0:
                with pytest.raises((errors.RequestNotFoundError, errors.ValidationError)):
                    self.do(work)
            elif place < request.num_chunks:
                assert self.do(work) is False
            elif not request.alive or request.is_closed:
                with pytest.raises(errors.InputClosedError):
                    self.do(work)
            elif place > request.num_chunks:
                with pytest.raises(errors.BrokerError):
                    self.do(work)
            else:
                assert self.do(work) is True
                request.extend(num_tokens + 1)

    @rule(number=NUMBERS)
    def close_input(self, number: int) -> None:
        request = self.expected.requests.get(f"r{number}")
        work = self.broker.input.close(f"r{number}")
        if request is None or request.num_chunks == 0:
            with pytest.raises((errors.RequestNotFoundError, errors.ValidationError)):
                self.do(work)
            return
        self.do(work)
        request.is_closed = True
        if request.state is RequestState.AWAITING_INPUT:
            request.end(RequestState.FINISHED)

    @rule(
        numbers=st.lists(NUMBERS, min_size=1, max_size=3),
        engine=st.sampled_from(ENGINES),
    )
    def answer(self, numbers: list[int], engine: str) -> None:
        """Resumable requests come, are claimed and answered: most of what can go wrong begins there."""
        if self.expected.is_paused:
            self.resume()
        for number in numbers:
            self.enqueue_resumable(number, TENANTS[0], "interactive", 1)
        self.claim_some(engine, 5)
        for request_id, request in self.expected.held_by(engine).items():
            self.end_segment(Holding(request_id, request.epoch, engine), 1, 1)

    @rule(holding=consumes(EngineMachine.holdings), num_tokens=st.integers(0, 2), times=st.integers(1, 2))
    def end_segment(self, holding: Holding, num_tokens: int, times: int) -> None:
        request = self.expected.requests.get(holding.request_id)
        if request is None or request.num_chunks == 0:
            return
        tokens = [next(self.token) for _ in range(num_tokens)]
        index = len(request.tokens)
        end = SegmentEnd(request.num_segments, index + num_tokens, FinishReason.STOP)
        # What is counted of the prompt stays as it was, so that the sums can be compared.
        key = self.broker.keys.request(holding.request_id)
        usage = Usage(num_prompt_tokens=int(self.do(self.connection.execute("HGET", key, "prompt"))))
        delta = Delta(index=index, token_ids=tokens, segment_ends=[end], usage=usage)
        refused = self.refused(holding)
        for _ in range(times):
            record = SegmentRecord(holding.request_id, holding.epoch, delta)
            assert self.do(self.broker.end_segments([record])) == refused
        if not refused:
            request.tokens += tokens
            request.end_segment()
