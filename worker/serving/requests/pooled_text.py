"""What a text that is pooled begins with, and texts that are judged two by two."""

from __future__ import annotations

from ....shared.errors import ValidationError
from ....shared.messages.requests import EngineCoreRequest
from ....shared.params.pooling import PoolingSetup
from ....shared.params.tokenization import Cut
from ....shared.shown import shown
from ...text.thread import TextThread
from ...text.tokenizer import TextCodec


class PooledText:
    """Completes the texts of requests to a model that pools, by what its folder says."""

    def __init__(self, codec: TextCodec, setup: PoolingSetup | None, thread: TextThread) -> None:
        self._codec = codec
        self._thread = thread
        self._setup = setup or PoolingSetup()

    async def complete(self, request: EngineCoreRequest, cut: Cut | None = None) -> None:
        """Put the prompt that is named, or the model's own, before the text; make token ids of a pair.

        Args:
            cut: what is kept of a pair.

        Raises:
            ValidationError: the model has no such prompt, or a prompt is named for what is no text.
        """
        params = request.pooling_params
        name = None if params is None else params.prompt_name
        if request.prompt is None:
            if name is not None:
                raise ValidationError(f"prompt_name={shown(name)} needs a prompt of text; leave it out")
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
            told = f"one of {', '.join(sorted(prompts))}" if prompts else "left out: the model comes with no prompts"
            raise ValidationError(f"prompt_name must be {told}, got {shown(name)}")
        return prompts[name]
