"""Beam search in the client: a loop of one-token requests whose prompts are in the prefix cache."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Unpack

from ...shared.errors import PromptTooLongError, RequestFailedError, UnsupportedParameterError, ValidationError
from ...shared.messages.outcome import TokenLogprobs
from ...shared.values.shown import shown
from ..background.concurrency import run_all
from ..client_parts.generation import Generations
from ..control.model_view import TextControl
from ..inputs.images import split_prompt
from ..inputs.options import RequestOptions, SharedOptions, expiry_time_of
from ..inputs.prompt import EmbedsArray, Prompt, as_prompts
from ..results.outputs import RequestOutput
from .beams import BeamSearchOutput, BeamSearchParams, search_beams

# Prompts searched concurrently; each has up to beam_width running requests.
MAX_SEARCHES = 64


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
            and as ``stream``, ``tokenize`` and ``detokenize``.
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
