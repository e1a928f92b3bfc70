"""Beam search in the client: sequences are extended one token at a time, and the best are kept.

Each step is a one-token request whose prompt is in the prefix cache.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any, Unpack

import msgspec

from ..shared.errors import PromptTooLongError, RequestFailedError, UnsupportedParameterError, ValidationError
from ..shared.messages.outcome import FinishReason, TokenLogprobs
from ..shared.params.checks import check_number
from ..shared.params.sampling import MAX_LOGPROBS, SamplingParams
from ..shared.values.arguments import CheckedNames
from ..shared.values.shown import shown
from .background.concurrency import run_all
from .client_parts.generation import Generations
from .control.model_view import TextControl
from .inputs.images import split_prompt
from .inputs.options import RequestOptions, SharedOptions, expiry_time_of
from .inputs.prompt import EmbedsArray, Prompt, as_prompts
from .results import RequestOutput

# Prompts searched concurrently; each has up to beam_width running requests.
MAX_SEARCHES = 64
MAX_BEAM_WIDTH = MAX_LOGPROBS // 2


class BeamSearches(Generations, TextControl):
    """The part of the client that searches for the most probable sequences."""

    async def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        concurrency_limit: int | None = None,
        **options: Unpack[SharedOptions],
    ) -> list[BeamSearchOutput]:
        """Search for the best ``params.beam_width`` continuations of each prompt, and return them in order.

        Each step is one request per beam, which is queued and survives crashes like any other. The search itself runs
        in this process, and ends with it. The prefixes of beams are in the prefix cache of the engine that computed
        them.

        Args:
            concurrency_limit: limit of prompts that are searched concurrently.

        Raises:
            ValidationError: ``params`` is not a BeamSearchParams, or a prompt is invalid.
            UnsupportedParameterError: a prompt is embeddings.
            RequestFailedError: a step was cancelled or expired; the code is "cancelled" or "expired".
            PenstockError: any error of ``stream``, ``tokenize`` or ``detokenize``.
        """
        if not isinstance(params, BeamSearchParams):
            raise ValidationError(f"params must be a BeamSearchParams, got {type(params).__name__}")
        if concurrency_limit is not None and not concurrency_limit >= 1:
            raise ValidationError(f"concurrency_limit must be at least 1, got {shown(concurrency_limit)}")
        limit = asyncio.Semaphore(concurrency_limit or MAX_SEARCHES)

        async def search(prompt: Prompt) -> BeamSearchOutput:
            async with limit:
                return await self._search(prompt, params, options)

        return await run_all(search(prompt) for prompt in as_prompts(prompts))

    async def _search(self, prompt: Prompt, params: BeamSearchParams, options: SharedOptions) -> BeamSearchOutput:
        # Resolved once, so that all steps use the same version of an adapter and the search's deadline.
        resolved: RequestOptions = {**options}
        card = await self._builder.checked_card(resolved)
        step_options: SharedOptions = {
            "read_ttl_s": 0.0,  # the result of a step is read once
            **resolved,
            "deadline": expiry_time_of(resolved),
            "timeout_s": None,
            "chat_template_kwargs": None,
            "tokenization_kwargs": None,
        }
        bare, images = split_prompt(prompt)
        token_ids = await self._tokens_of(bare, resolved)
        if card.max_model_len and len(token_ids) >= card.max_model_len:
            raise PromptTooLongError(
                f"prompt has {len(token_ids)} tokens, but max_model_len of {shown(card.model)} is "
                f"{card.max_model_len}, and at least one output token must fit"
            )
        with_images = {"image": [image.data for image in images]}

        async def run_step(beam: list[int]) -> RequestOutput:
            step: Prompt = {"prompt_token_ids": beam, "multi_modal_data": with_images} if images else beam
            return await self.generate(step, params.step_params, **step_options)

        # The first step reports how many tokens the images take.
        firsts = [await run_step(token_ids)]
        num_tokens = len(token_ids) if firsts[0].usage is None else firsts[0].usage.num_prompt_tokens

        async def next_tokens(beams: list[list[int]]) -> list[TokenLogprobs]:
            outputs = [firsts.pop()] if firsts else await run_all(map(run_step, beams))
            return [_next_token(output) for output in outputs]

        sequences = await search_beams(
            token_ids,
            params,
            next_tokens,
            eos_token_ids=frozenset(card.eos_token_ids),
            max_model_len=card.max_model_len and card.max_model_len - (num_tokens - len(token_ids)),
        )
        for sequence in sequences:
            if sequence.output_token_ids:
                sequence.text = await self.detokenize(sequence.output_token_ids, model=card.model)
        return BeamSearchOutput(prompt, sequences)

    async def _tokens_of(self, prompt: Prompt, options: SharedOptions) -> list[int]:
        """Return the tokens of the prompt, which an engine's tokenizer computes."""
        if isinstance(prompt, EmbedsArray) and not isinstance(prompt, Sequence):
            raise UnsupportedParameterError("beam_search takes text, token ids or messages, not embeddings")
        if not isinstance(prompt, str) and prompt and all(isinstance(item, int) for item in prompt):
            return list(prompt)  # type: ignore[arg-type]  # narrowed by all()
        if options.get("tokenization_kwargs"):
            raise UnsupportedParameterError(
                "tokenization_kwargs: beam_search of text does not support it; pass token ids"
            )
        if prompt == "":
            raise ValidationError("prompt must not be empty, got ''")
        tokens = await self.tokenize(
            prompt,  # type: ignore[arg-type]  # other types are refused there
            model=options.get("model"),
            chat_template_kwargs=options.get("chat_template_kwargs"),
        )
        return tokens.token_ids


def _next_token(output: RequestOutput) -> TokenLogprobs:
    """Return the token of a step. Raises ``RequestFailedError`` if it ended without one."""
    (answer,) = output.outputs
    if not answer.logprobs:
        message = f"the search ended because its step {output.request_id} ended: {answer.finish_reason}"
        raise RequestFailedError(message, code=str(answer.finish_reason))
    return answer.logprobs[0]


class BeamSearchParams(msgspec.Struct, metaclass=CheckedNames, frozen=True, kw_only=True):
    """Parameters of a search, with vLLM's names.

    Args:
        beam_width: number of beams that continue, and of sequences returned. Range [1, 10].
        max_tokens: limit of output tokens.
        ignore_eos: treat an end of sequence like any token.
        temperature: of one more candidate that is sampled per beam; 0 samples none. Sequences are compared by the
            model's own log probabilities, as in vLLM.
        length_penalty: sequences are compared by the sum of their log probabilities, divided by the number of tokens
            (including the prompt) to the power of this.
        include_stop_str_in_output: keep the end of sequence among the tokens.

    Raises:
        ValidationError: a value has the wrong type or range.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        check_number("beam_width", self.beam_width, int, 1, MAX_BEAM_WIDTH)
        check_number("max_tokens", self.max_tokens, int, 1, 2**31 - 1)
        check_number("temperature", self.temperature, float, 0.0, 100.0)
        check_number("length_penalty", self.length_penalty, float, -20.0, 20.0)
        for name in ("ignore_eos", "include_stop_str_in_output"):
            value: Any = getattr(self, name)
            if not isinstance(value, bool):
                raise ValidationError(f"{name} must be True or False, got {shown(value)}")

    @property
    def step_params(self) -> SamplingParams:
        """Sampling parameters of one step: the next token, and the most probable ones."""
        return SamplingParams(
            max_tokens=1,
            temperature=self.temperature,
            logprobs=2 * self.beam_width,
            ignore_eos=True,  # an end of sequence is returned like any token
            detokenize=False,
        )


class BeamSearchSequence(msgspec.Struct, kw_only=True):
    """A sequence: ``tokens`` of prompt and output, the log probability of each output token, and their sum.

    ``text`` is that of the output. ``finish_reason`` is "stop" at an end of sequence, whose id is ``stop_reason``.
    """

    tokens: list[int]
    logprobs: list[float]
    cum_logprob: float
    text: str = ""
    finish_reason: FinishReason = FinishReason.LENGTH
    stop_reason: int | None = None
    num_prompt_tokens: int = 0

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens after the prompt."""
        return self.tokens[self.num_prompt_tokens :]

    def score(self, length_penalty: float) -> float:
        """Return the value by which sequences are compared. An end of sequence counts for the sum, but not for the
        length."""
        num_tokens = len(self.tokens)
        if self.stop_reason is not None and self.tokens[-1] == self.stop_reason:
            num_tokens -= 1
        return self.cum_logprob / num_tokens**length_penalty


class BeamSearchOutput(msgspec.Struct):
    """Result for one prompt: at most ``beam_width`` sequences, the best first."""

    prompt: object
    sequences: list[BeamSearchSequence]


async def search_beams(
    prompt_token_ids: list[int],
    params: BeamSearchParams,
    next_tokens: Callable[[list[list[int]]], Awaitable[list[TokenLogprobs]]],
    *,
    eos_token_ids: Collection[int],
    max_model_len: int,
) -> list[BeamSearchSequence]:
    """Return the best sequences, without their texts.

    Args:
        next_tokens: returns the candidates for the next token of each beam, given the tokens of the beams.
        max_model_len: limit of prompt and output tokens together; 0 without a limit.
    """
    num_prompt_tokens = len(prompt_token_ids)
    beams = [BeamSearchSequence(tokens=prompt_token_ids, logprobs=[], cum_logprob=0.0)]
    beams[0].num_prompt_tokens = num_prompt_tokens
    ended: list[BeamSearchSequence] = []
    num_steps = params.max_tokens if not max_model_len else min(params.max_tokens, max_model_len - num_prompt_tokens)
    for _ in range(num_steps):
        grown: list[BeamSearchSequence] = []
        for beam, token in zip(beams, await next_tokens([beam.tokens for beam in beams]), strict=True):
            for token_id, logprob in _candidates(token, 2 * params.beam_width):
                is_end = token_id in eos_token_ids and not params.ignore_eos
                (ended if is_end else grown).append(_extended(beam, token_id, logprob, params, is_end=is_end))
        # Equal scores keep the order of their beams, so that the same search gives the same sequences.
        beams = sorted(grown, key=lambda beam: -beam.score(params.length_penalty))[: params.beam_width]
        if not beams:
            break
    return sorted([*ended, *beams], key=lambda beam: -beam.score(params.length_penalty))[: params.beam_width]


def _candidates(token: TokenLogprobs, num_most_probable: int) -> list[tuple[int, float]]:
    """Return the most probable tokens, and the sampled one."""
    top = token.top[:num_most_probable]
    is_listed = any(token_id == token.token_id for token_id, _ in top)
    return [pair for pair in (top if is_listed else [*top, (token.token_id, token.logprob)]) if pair[1] > -math.inf]


def _extended(
    beam: BeamSearchSequence, token_id: int, logprob: float, params: BeamSearchParams, *, is_end: bool
) -> BeamSearchSequence:
    is_included = not is_end or params.include_stop_str_in_output
    return BeamSearchSequence(
        tokens=[*beam.tokens, token_id] if is_included else beam.tokens,
        logprobs=[*beam.logprobs, logprob],
        cum_logprob=beam.cum_logprob + logprob,
        finish_reason=FinishReason.STOP if is_end else FinishReason.LENGTH,
        stop_reason=token_id if is_end else None,
        num_prompt_tokens=beam.num_prompt_tokens,
    )
