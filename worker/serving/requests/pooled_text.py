"""Prompts of pooling requests: the named prefix before a text, and tokens of text pairs."""

from __future__ import annotations

from ....shared.errors import ValidationError
from ....shared.messages.requests import EngineCoreRequest
from ....shared.params.pooling import PoolingSetup
from ....shared.params.tokenization import Cut
from ....shared.values.shown import shown
from ...text.thread import TextThread
from ...text.tokenizer import TextCodec


class PooledText:
    """Completes the texts of requests to a pooling model, from the prompts in its folder."""

    def __init__(self, codec: TextCodec, setup: PoolingSetup | None, thread: TextThread) -> None:
        self._codec = codec
        self._thread = thread
        self._setup = setup or PoolingSetup()

    async def complete(self, request: EngineCoreRequest, cut: Cut | None = None) -> None:
        """Put the named prompt, or the model's default one, before the text. Tokenize a pair of texts.

        Args:
            cut: truncation of a pair.

        Raises:
            ValidationError: the model has no such prompt, or a prompt is named for an input that is not text.
        """
        params = request.pooling_params
        name = None if params is None else params.prompt_name
        if request.prompt is None:
            if name is not None:
                raise ValidationError(f"prompt_name={shown(name)} requires a text prompt; leave it out")
            return
        beginning = self._beginning(name)
        if request.text_pair is None:
            request.prompt = beginning + request.prompt
            return
        text, other = beginning + request.prompt, request.text_pair
        request.prompt_token_ids, request.second_text_at = await self._thread.run(
            lambda: self._codec.encode_pair(text, other, cut), len(text) + len(other)
        )
        request.prompt = request.text_pair = None

    def _beginning(self, name: str | None) -> str:
        prompts = self._setup.prompts
        if name is None:
            return prompts.get(self._setup.default_prompt_name or "", "")
        if name not in prompts:
            allowed = f"one of {', '.join(sorted(prompts))}" if prompts else "left out: the model has no prompts"
            raise ValidationError(f"prompt_name must be {allowed}, got {shown(name)}")
        return prompts[name]
