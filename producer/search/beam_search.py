"""Beam search of a client: a loop over requests for one token each, whose prompts are in the prefix cache."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Unpack

from ...shared.errors import PromptTooLongError, RequestFailedError, UnsupportedParameterError, ValidationError
from ...shared.messages.outcome import TokenLogprobs
from ...shared.shown import shown
from ..control.text_calls import TextControl
from ..generations import Generations
from ..inputs.embeds import EmbedsArray
from ..inputs.images import split_prompt
from ..inputs.options import RequestOptions, SharedOptions, wanted_until
from ..inputs.prompt import Prompt, as_prompts
from ..results.outputs import RequestOutput
from ..together import together
from .beams import BeamSearchOutput, BeamSearchParams, search_beams

# Prompts searched at once; each has up to beam_width requests under way.
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
        """Search for the best ``params.beam_width`` sequences behind each prompt, and return them in order.

        Each step is a request for each beam, which waits, runs and survives deaths as any other; the search itself is
        in this process, and ends with it. The beams' beginnings are in the prefix cache of the engine that had them.

        Args:
            concurrency_limit: most prompts that are searched at once.

        Raises:
            ValidationError: ``params`` are none, or a prompt is wrong.
            UnsupportedParameterError: a prompt is embeddings.
            RequestFailedError: a step was cancelled, or the time was up; the code is "cancelled" or "expired".
            and as ``stream``, ``tokenize`` and ``detokenize``.
        """
        if not isinstance(params, BeamSearchParams):
            raise ValidationError(f"params must be a BeamSearchParams, got {type(params).__name__}")
        if concurrency_limit is not None and not concurrency_limit >= 1:
            raise ValidationError(f"concurrency_limit must be at least 1, got {shown(concurrency_limit)}")
        at_once = asyncio.Semaphore(concurrency_limit or MAX_SEARCHES)

        async def one(prompt: Prompt) -> BeamSearchOutput:
            async with at_once:
                return await self._search(prompt, params, options)

        return await together(one(prompt) for prompt in as_prompts(prompts))

    async def _search(self, prompt: Prompt, params: BeamSearchParams, options: SharedOptions) -> BeamSearchOutput:
        # Found once: all steps have what the name of an adapter means now, and the time that is left of the search's.
        found: RequestOptions = {**options}
        card = await self._builder.checked_card(found)
        asked: SharedOptions = {
            "read_ttl_s": 0.0,  # nobody asks for a step again
            **found,
            "deadline": wanted_until(found),
            "timeout_s": None,
            "chat_template_kwargs": None,
            "tokenization_kwargs": None,
        }
        bare, images = split_prompt(prompt)
        token_ids = await self._tokens_of(bare, found)
        if card.max_model_len and len(token_ids) >= card.max_model_len:
            raise PromptTooLongError(
                f"prompt has {len(token_ids)} tokens, but max_model_len of {shown(card.model)} is "
                f"{card.max_model_len}, and at least one output token must fit"
            )
        with_images = {"image": [image.data for image in images]}

        async def step_of(beam: list[int]) -> RequestOutput:
            step: Prompt = {"prompt_token_ids": beam, "multi_modal_data": with_images} if images else beam
            return await self.generate(step, params.of_one_step, **asked)

        # How many tokens stand for the images is told with the first step.
        firsts = [await step_of(token_ids)]
        num_tokens = len(token_ids) if firsts[0].usage is None else firsts[0].usage.num_prompt_tokens

        async def ask(beams: list[list[int]]) -> list[TokenLogprobs]:
            outputs = [firsts.pop()] if firsts else await together(map(step_of, beams))
            return [_next_token(output) for output in outputs]

        sequences = await search_beams(
            token_ids,
            params,
            ask,
            eos_token_ids=frozenset(card.eos_token_ids),
            max_model_len=card.max_model_len and card.max_model_len - (num_tokens - len(token_ids)),
        )
        for sequence in sequences:
            if sequence.output_token_ids:
                sequence.text = await self.detokenize(sequence.output_token_ids, model=card.model)
        return BeamSearchOutput(prompt, sequences)

    async def _tokens_of(self, prompt: Prompt, options: SharedOptions) -> list[int]:
        """The tokens that beams begin with: an engine's tokenizer has made them."""
        if isinstance(prompt, EmbedsArray) and not isinstance(prompt, Sequence):
            raise UnsupportedParameterError("beam_search takes text, token ids or messages, not embeddings")
        if not isinstance(prompt, str) and prompt and all(isinstance(item, int) for item in prompt):
            return list(prompt)  # type: ignore[arg-type]  # narrowed by all()
        if options.get("tokenization_kwargs"):
            raise UnsupportedParameterError("tokenization_kwargs: beam_search of text has none; pass token ids")
        if prompt == "":
            raise ValidationError("prompt must not be empty, got ''")
        told = await self.tokenize(
            prompt,  # type: ignore[arg-type]  # what is neither is refused there
            model=options.get("model"),
            chat_template_kwargs=options.get("chat_template_kwargs"),
        )
        return told.token_ids


def _next_token(output: RequestOutput) -> TokenLogprobs:
    """What a step has found. Raises ``RequestFailedError`` if it ended without a token."""
    (answer,) = output.outputs
    if not answer.logprobs:
        told = f"the search ended with request {output.request_id}, a step of it: {answer.finish_reason}"
        raise RequestFailedError(told, code=str(answer.finish_reason))
    return answer.logprobs[0]
