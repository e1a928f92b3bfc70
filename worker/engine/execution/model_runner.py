"""Runs one scheduled step on the model, and verifies its draft tokens in waves (ops/decisions/speculation.md).

The forward returns logits after the last known token of a request and after each of its draft tokens. Every request
gets its next token as without drafts. If the token equals the draft token, the request gets a further one, from the
logits after that draft token, and so on. A wave is one call of the sampler for all requests that continue. Between two
waves the tokens are recorded as between two steps, so penalties, rules and grammars have the same state as without
drafts, and nothing is ever undone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from ....kernels.paged_attention import PagedBatch
from ....shared.messages.outcome import TokenLogprobs
from ...models.adapters.slots import AdapterSlots
from ...models.forward import ModelInput, VisionInputs, feed
from ...models.lean.captured import CapturedForward
from ...models.loaded import LoadedModel
from ...models.placing.device import to_device
from ..core.step_input import IntArray, StepInput
from ..sampling.logprobs import PromptRows, RawLogprobs, prompt_logprobs_of
from ..sampling.sampler import SamplingRows, sample
from ..scheduling.request import Request
from ..scheduling.scheduler_output import AcceleratorError, SampledTokens, SchedulerOutput
from .batch import ExpectedTokens, InputBatch
from .input_embeds import embed_inputs, vision_inputs_of

LogprobsByRow = dict[int, TokenLogprobs]
# Returns the log probabilities of prompt tokens by request_id, from their logits ``[P, V]``.
ScorePrompts = Callable[[torch.Tensor, PromptRows], dict[str, list[TokenLogprobs]]]


@dataclass(slots=True)
class PreparedStep:
    """A step with prepared inputs; ``requests`` are in the scheduler's order."""

    requests: list[Request]
    step: StepInput
    prompt_rows: PromptRows | None

    @property
    def logit_rows(self) -> IntArray:
        """Packed tokens that need logits, ascending: to sample new tokens, and to score prompt tokens."""
        if self.prompt_rows is None:
            return self.step.logit_rows
        return np.union1d(self.step.logit_rows, self.prompt_rows.logit_rows)


@dataclass(slots=True)
class ForwardResult:
    """Result of a step's forward: logits ``[L, V]``, and log probabilities of prompt tokens by request_id."""

    logits: torch.Tensor
    prompt_logprobs: dict[str, list[TokenLogprobs]]


class ModelRunner:
    """Executor that computes in this process, on one device.

    Args:
        batch: of the size that the caches of ``model`` will have.
        adapters: slots of the model's adapters; None if no adapters are served.

    Attributes:
        score_prompts: computes ``prompt_logprobs``; a measurement of quality replaces it to read the logits.
    """

    # Whether the result of a row must not depend on the other rows.
    _is_batch_invariant = False

    def __init__(self, model: LoadedModel, batch: InputBatch, adapters: AdapterSlots | None = None) -> None:
        self._model = model
        self._device = model.device
        # Graphs take all inputs from the host in one copy.
        self._input_device = torch.device("cpu") if isinstance(model.forward, CapturedForward) else model.device
        self._batch = batch
        self._adapters = adapters
        self.score_prompts: ScorePrompts = partial(prompt_logprobs_of, one_by_one=self._is_batch_invariant)

    @property
    def device_memory_bytes(self) -> int:
        """See ``Executor``."""
        device = self._model.device
        return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput) -> SampledTokens:
        """See ``Executor``."""
        prepared = self.begin(output)
        return self.finish(prepared, self.compute(prepared))

    def begin(self, output: SchedulerOutput, fed_tokens: torch.Tensor | None = None) -> PreparedStep:
        """Prepare the inputs. First of the three stages of ``execute``; call all three in inference mode.

        Adapters are copied into their slots here. Nothing computes meanwhile, or the device computes it before.

        Args:
            fed_tokens: see ``StepInput``.
        """
        if self._adapters is not None:
            self._adapters.flush()
        step = self._batch.prepare(output)
        step.fed_tokens = fed_tokens
        return PreparedStep(output.requests, step, self._batch.prompt_rows.select(step))

    def compute(self, prepared: PreparedStep) -> ForwardResult:
        """Run the forward: the second stage. May run in another thread, since its inputs stay unchanged meanwhile.

        Raises:
            AcceleratorError: see ``Executor``.
        """
        try:
            logits = self._forward(prepared.step, prepared.logit_rows)
        except torch.AcceleratorError as error:
            raise AcceleratorError(str(error)) from error
        return self.forward_result_of(prepared, logits)

    def samples_alone(self, prepared: PreparedStep) -> bool:
        """Return whether a step's tokens follow from its logits alone, and are all that it returns."""
        step = prepared.step
        is_plain = prepared.prompt_rows is None and step.num_drafts is None
        return is_plain and self._batch.sampling.gives_tokens_alone(step.sampled_rows)

    def sample_unread(self, prepared: PreparedStep, logits: torch.Tensor) -> tuple[torch.Tensor, ExpectedTokens]:
        """Sample a step that ``samples_alone``, and commit it; return the tokens ``[R]`` on the device. ``receive``
        takes them when the host has read them.
        """
        step = prepared.step
        rows = self._batch.sampling.select(step.sampled_rows, step.num_known_tokens)
        token_ids = sample(logits, rows) if len(logits) else torch.zeros(0, dtype=torch.int64, device=self._device)
        self._model.forward.commit()
        return token_ids, self._batch.expect_tokens(step.sampled_rows)

    def receive(self, prepared: PreparedStep, expected: ExpectedTokens, token_ids: IntArray) -> SampledTokens:
        """Record and return the tokens of ``sample_unread``."""
        self._batch.receive_tokens(expected, token_ids)
        step = prepared.step
        return SampledTokens(_group_by_request(step.order[step.sampled], token_ids, len(step.rows)))

    def forget(self, expected: ExpectedTokens) -> None:
        """Undo the record of tokens that the host cannot read. Forget those of later steps first."""
        self._batch.forget_tokens(expected)

    def finish(self, prepared: PreparedStep, computed: ForwardResult) -> SampledTokens:
        """Sample the tokens: the third stage.

        Raises:
            AcceleratorError: see ``Executor``.
        """
        step, logits = prepared.step, computed.logits
        first_logits = step.first_logits
        if first_logits is not None:
            logits = logits[to_device(first_logits, self._device)]
        try:
            sampled_ids, logprobs = self._sample_rows(logits, step.sampled_rows, step.num_known_tokens)
        except torch.AcceleratorError as error:
            raise AcceleratorError(str(error)) from error
        # Commit before any token is recorded: if it fails, the step is computed again.
        self._model.forward.commit()
        self._batch.append_tokens(step.sampled_rows, sampled_ids)
        places = step.order[step.sampled]
        request_logprobs = {
            prepared.requests[places[row]].request_id: [token_logprobs] for row, token_logprobs in logprobs.items()
        }
        token_ids = _group_by_request(places, sampled_ids, len(step.rows))
        sampled = SampledTokens(token_ids, request_logprobs, computed.prompt_logprobs)
        if step.num_drafts is not None:
            self._verify(prepared, computed.logits, sampled)
        return sampled

    def _verify(self, prepared: PreparedStep, logits: torch.Tensor, sampled: SampledTokens) -> None:
        """Append the tokens that follow accepted draft tokens to ``sampled``; ``logits [L, V]``."""
        verification = Verification(prepared.step, prepared.requests, sampled)
        while len(wave := verification.next_wave()):
            try:
                logit_rows = to_device(verification.logits_of(wave), self._device)
                token_ids, logprobs = self._sample_rows(logits[logit_rows], *verification.rows_of(wave))
            except Exception:
                # Earlier tokens are recorded and stay valid. The next step begins with this one and raises again.
                return
            self._batch.append_tokens(verification.rows_of(wave)[0], token_ids)
            verification.add_wave(wave, token_ids, logprobs)

    def warm_up(self, request: Request) -> None:
        """Prefill and decode ``request`` once in the first block, so that the first real request is not delayed."""
        self._batch.tables.assign_first_blocks(request)
        for num_new_tokens in (request.num_tokens, 1):
            (token_ids,) = self.execute(SchedulerOutput([request], [num_new_tokens])).token_ids
            request.num_computed_tokens += num_new_tokens
            request.token_ids += token_ids
        self._batch.release([request.request_id])

    @torch.inference_mode()
    def execute_dummy_batch(self) -> None:
        """Run one token that belongs to no request through the model."""
        self.compute_unstored(1)

    def compute_unstored(self, num_tokens: int) -> None:
        """Run ``num_tokens`` tokens that belong to no request through the model, and compute all their logits.

        Uses no row of the batch and writes to no cache slot. Call it in inference mode.
        """
        zero, count = np.zeros(1, np.int64), np.full(1, num_tokens)
        positions = np.arange(num_tokens)
        step = StepInput(
            order=zero,
            rows=zero,
            token_ids=np.zeros(num_tokens, np.int64),
            positions=positions,
            slot_mapping=np.full(num_tokens, -1),
            query_lens=count,
            seq_lens=count,
            logit_rows=positions,
            sampled=zero,
            group_slots=self._batch.tables.no_slots(num_tokens),
        )
        self._forward(step, step.logit_rows)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _forward(self, step: StepInput, logit_rows: IntArray) -> torch.Tensor:
        """Return the logits of the packed tokens ``logit_rows``, ascending: ``[len(logit_rows), V]``."""
        return self._model.forward.run(self.input_of(step, logit_rows))

    def input_of(self, step: StepInput, logit_rows: IntArray) -> ModelInput:
        """Return the forward's input for ``step``, with logits of the packed tokens ``logit_rows``, ascending."""
        max_blocks = -(-int(step.seq_lens.max()) // self._batch.block_size)
        batch = self._paged(step, max_blocks)
        embeds, vision_inputs = self._vision_inputs(step)
        model_input = ModelInput(
            token_ids=to_device(step.token_ids, self._input_device),
            positions=to_device(step.positions, self._input_device),
            logit_rows=to_device(logit_rows, self._input_device),
            batch=batch,
            state_slots=step.rows,
            inputs_embeds=embeds,
            vision_inputs=vision_inputs,
            token_lora=None if step.token_lora is None else to_device(step.token_lora, self._input_device),
            token_types=None if step.token_types is None else to_device(step.token_types, self._input_device),
            fed_tokens=step.fed_tokens,
        )
        # Graphs replace the indices of fed tokens themselves.
        return model_input if isinstance(self._model.forward, CapturedForward) else model_input.with_fed_tokens()

    def _paged(self, step: StepInput, max_blocks: int) -> PagedBatch:
        """Return the cache locations of ``step``; its requests have at most ``max_blocks`` blocks each."""
        lens = step.query_lens.tolist(), step.seq_lens.tolist(), self._batch.block_size
        ends = self._batch.visible_ends.select(step)
        visible_ends = None if ends is None else to_device(ends, self._input_device)
        tables = self._batch.tables
        if tables.tables is None or step.group_slots is None:
            table = to_device(tables.table[step.rows, :max_blocks], self._input_device)
            slots = to_device(step.slot_mapping, self._input_device)
            return PagedBatch(table, slots, *lens, visible_ends=visible_ends)
        group_tables = to_device(np.ascontiguousarray(tables.tables[:, step.rows, :max_blocks]), self._input_device)
        slots = to_device(step.group_slots, self._input_device)
        return PagedBatch(
            group_tables[0], slots[0], *lens, visible_ends=visible_ends, group_tables=group_tables, group_slots=slots
        )

    def _inputs_embeds(self, step: StepInput) -> torch.Tensor | None:
        """Return embeddings that replace those of ``step.token_ids``; None to use the latter."""
        return self._vision_inputs(step)[0]

    def _vision_inputs(self, step: StepInput) -> tuple[torch.Tensor | None, VisionInputs | None]:
        """Return ``_inputs_embeds``, and the other inputs from images."""
        step_embeds = self._batch.embeds.select(step)
        axes = self._batch.axes.select(step)
        if step_embeds is None:
            return None, None if axes is None else vision_inputs_of(self._model, axes, None, 0)
        token_ids = to_device(step.token_ids, self._device)
        token_ids = token_ids if step.fed_tokens is None else feed(token_ids, step.fed_tokens)
        inputs = embed_inputs(self._model, token_ids, step_embeds)
        return inputs, vision_inputs_of(self._model, axes, step_embeds, inputs.shape[1])

    def forward_result_of(self, prepared: PreparedStep, logits: torch.Tensor) -> ForwardResult:
        """Split ``logits`` of ``prepared.logit_rows`` into those to sample and those that score prompts. Raises as
        ``compute``.
        """
        prompt_rows = prepared.prompt_rows
        if prompt_rows is None:
            return ForwardResult(logits, {})
        is_prompt = np.isin(prepared.logit_rows, prompt_rows.logit_rows)
        places = (np.nonzero(mask)[0] for mask in (is_prompt, ~is_prompt))
        try:
            prompt_logits, sampled_logits = (logits[to_device(rows, self._device)] for rows in places)
            logprobs = self.score_prompts(prompt_logits, prompt_rows)
        except torch.AcceleratorError as error:
            raise AcceleratorError(str(error)) from error
        return ForwardResult(sampled_logits, logprobs)

    def _sample_rows(
        self, logits: torch.Tensor, rows: IntArray, num_tokens: IntArray
    ) -> tuple[IntArray, LogprobsByRow]:
        """Return token ids of ``rows``, ``[R]``, from logits ``[R, V]``, and log probabilities if requested.

        Args:
            num_tokens: ``[R]``, numbers of tokens of the requests of ``rows``.
        """
        if len(rows) == 0:
            return np.zeros(0, np.int64), {}
        return self._sample(logits, self._batch.sampling.select(rows, num_tokens))

    def _sample(self, logits: torch.Tensor, rows: SamplingRows) -> tuple[IntArray, LogprobsByRow]:
        """Sample as ``_sample_rows``; ``logits`` may be overwritten."""
        raw = None if rows.num_logprobs is None else RawLogprobs.of(logits, rows.num_logprobs)
        token_ids = sample(logits, rows)
        return token_ids.cpu().numpy(), {} if raw is None else raw.at(token_ids)


def _group_by_request(places: IntArray, token_ids: IntArray, num_requests: int) -> list[list[int]]:
    """Return a list of tokens per request: ``token_ids``, ``[R]``, for requests ``places``; empty for the others."""
    if len(places) == num_requests:
        ordered = np.empty_like(token_ids)
        ordered[places] = token_ids
        return ordered[:, None].tolist()
    lists: list[list[int]] = [[] for _ in range(num_requests)]
    for place, token_id in zip(places.tolist(), token_ids.tolist(), strict=True):
        lists[place].append(token_id)
    return lists


class Verification:
    """Verifies the draft tokens of one step.

    A wave is given by the indices ``[W]`` of its requests among the requests that ``step`` samples.

    Args:
        requests: requests of the batch, in the scheduler's order.
        sampled: holds the first token of each request. Tokens and log probabilities of the waves are added to it.
    """

    def __init__(self, step: StepInput, requests: list[Request], sampled: SampledTokens) -> None:
        assert step.num_drafts is not None
        assert step.first_logits is not None
        self._step, self._requests, self._sampled = step, requests, sampled
        self._num_drafts, self._first_logits = step.num_drafts, step.first_logits
        self._num_known_tokens = step.num_known_tokens
        self._places = step.order[step.sampled]
        self._wave = np.arange(len(step.sampled))
        self._number = 0

    def next_wave(self) -> IntArray:
        """Return the requests that get another token: their last one was drafted, and has not ended their grammar."""
        self._wave = np.array([i for i in self._wave.tolist() if self._continues(i)], np.int64)
        self._number += 1
        return self._wave

    def logits_of(self, wave: IntArray) -> IntArray:
        """Return the indices of the wave's logits among the step's logits, ``[W]``."""
        return self._first_logits[wave] + self._number

    def rows_of(self, wave: IntArray) -> tuple[IntArray, IntArray]:
        """Return the rows of the wave in the ``InputBatch``, and their current numbers of tokens, both ``[W]``."""
        return self._step.rows[self._step.sampled[wave]], self._num_known_tokens[wave] + self._number

    def add_wave(self, wave: IntArray, token_ids: IntArray, logprobs: Mapping[int, TokenLogprobs]) -> None:
        """Add the tokens of ``wave``, ``[W]``, and their log probabilities by index in ``wave``."""
        places = self._places[wave].tolist()
        for place, token_id in zip(places, token_ids.tolist(), strict=True):
            self._sampled.token_ids[place].append(token_id)
        for index, token_logprobs in logprobs.items():
            self._sampled.logprobs[self._requests[places[index]].request_id].append(token_logprobs)

    def _continues(self, index: int) -> bool:
        if self._number >= self._num_drafts[index]:
            return False
        place = self._places[index]
        next_input = self._step.logit_rows[self._first_logits[index] + self._number] + 1
        if self._step.token_ids[next_input] != self._sampled.token_ids[place][-1]:
            return False
        constraint = self._requests[place].constraint
        return constraint is None or not (constraint.is_terminated or constraint.failure is not None)
