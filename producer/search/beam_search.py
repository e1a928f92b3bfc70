"""Beam search of a client: a loop over requests for one token each, whose prompts are in the prefix cache."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Unpack

from ...shared.errors import PromptTooLongError, UnsupportedParameterError, ValidationError
from ...shared.messages.outcome import TokenLogprobs
from ...shared.shown import shown
from ..control.text_calls import TextControl
from ..generations import Generations
from ..inputs.embeds import EmbedsArray
from ..inputs.options import SharedOptions
from ..inputs.prompt import Prompt, as_prompts
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
        card = await self._builder.checked_card({**options})
        token_ids = await self._tokens_of(prompt, options)
        if card.max_model_len and len(token_ids) >= card.max_model_len:
            raise PromptTooLongError(
                f"prompt has {len(token_ids)} tokens, but max_model_len of {shown(card.model)} is "
                f"{card.max_model_len}, and at least one output token must fit"
            )
        of_one_step = params.of_one_step
        # Nobody asks for a step again.
        asked: SharedOptions = {"read_ttl_s": 0.0, **options, "chat_template_kwargs": None, "tokenization_kwargs": None}

        async def next_of(beam: list[int]) -> TokenLogprobs:
            output = await self.generate(beam, of_one_step, **asked)
            logprobs = output.outputs[0].logprobs
            if not logprobs:
                raise ValidationError(f"a step of the search ended without a token: {output.outputs[0].finish_reason}")
            return logprobs[0]

        async def ask(beams: list[list[int]]) -> list[TokenLogprobs]:
            return await together(map(next_of, beams))

        sequences = await search_beams(
            token_ids, params, ask, eos_token_ids=frozenset(card.eos_token_ids), max_model_len=card.max_model_len
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
        told = await self.tokenize(
            prompt,  # type: ignore[arg-type]  # what is neither is refused there
            model=options.get("model"),
            chat_template_kwargs=options.get("chat_template_kwargs"),
        )
        return told.token_ids
