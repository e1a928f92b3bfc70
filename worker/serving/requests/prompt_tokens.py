"""The tokens of a claimed request: of its prompt, its chunks, and its predicted output.

A pooling request may name a prompt, which is put before its text, and may consist of a pair of texts.
"""

from __future__ import annotations

from functools import partial

from ....shared.errors import UnsupportedParameterError, ValidationError
from ....shared.messages.requests import EngineCoreRequest, InputChunk
from ....shared.params.pooling import PoolingSetup
from ....shared.params.prompts import LEFT, Cut, num_kept
from ....shared.values.shown import shown
from ...request_checks import check_prompt_length
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


class PromptTokens:
    """Tokenizes the prompts of one model, long ones in ``thread``. ``setup`` is that of a pooling model."""

    def __init__(self, codec: TextCodec, max_model_len: int, setup: PoolingSetup | None, thread: TextThread) -> None:
        self._codec = codec
        self._max_model_len = max_model_len
        self._thread = thread
        self._pooled_text = PooledText(codec, setup, thread)

    async def complete(self, request: EngineCoreRequest, num_bytes: int) -> None:
        """Set the prompt tokens of ``request``, which has ``num_bytes``, unless its prompt is embeddings.

        Raises:
            ValidationError: the prompt is missing or has no tokens, or it cannot be truncated.
            PromptTooLongError: the prompt cannot fit, however it is tokenized.
        """
        cut = self._truncation(request)
        if request.pooling_params is not None:
            await self._pooled_text.complete(request, cut)
        if request.prompt_embeds is None:
            request.prompt_token_ids = await self._tokenize(request, cut, num_bytes)

    async def chunk_token_ids(self, number: int, chunk: InputChunk) -> list[int]:
        """Tokenize a chunk, without the tokens that begin and end a text, since it continues in the middle of one.

        Raises:
            ValidationError: the chunk has no tokens.
        """
        if chunk.prompt_token_ids is not None:
            token_ids = chunk.prompt_token_ids
        elif chunk.prompt is None:
            raise ValidationError(f"chunk {number} of the input has neither prompt nor prompt_token_ids")
        else:
            token_ids = await self._encode_middle(chunk.prompt)
        if not token_ids:
            raise ValidationError(f"chunk {number} of the input has no tokens")
        return token_ids

    async def prediction_token_ids(self, request: EngineCoreRequest) -> list[int] | None:
        """Tokenize the predicted output as the middle of a text, since an output continues the prompt."""
        return request.draft_token_ids if request.prediction is None else await self._encode_middle(request.prediction)

    async def _encode_middle(self, text: str) -> list[int]:
        return await self._thread.run(lambda: self._codec.encode_chunk(text), len(text))

    async def _tokenize(self, request: EngineCoreRequest, cut: Cut | None, num_bytes: int) -> list[int]:
        add_special_tokens = None if request.tokenization is None else request.tokenization.add_special_tokens
        prompt, messages = request.prompt, request.messages
        if request.prompt_token_ids is not None:
            token_ids = request.prompt_token_ids
            # A pair was truncated when it was tokenized, because the start of its second text must not move.
            if cut is not None and request.second_text_at is None:
                token_ids = cut.of(token_ids)
        elif messages is not None:
            kwargs = request.chat_template_kwargs
            self._check_tools(request)
            text = await self._thread.run(lambda: self._codec.render_chat(messages, kwargs), num_bytes)
            token_ids = await self._encode(request, text, cut, add_special_tokens=bool(add_special_tokens))
        elif prompt is not None:
            token_ids = await self._encode(request, prompt, cut, add_special_tokens=add_special_tokens is not False)
        else:
            raise ValidationError("the request has no prompt: one of prompt, prompt_token_ids and messages must be set")
        if not token_ids:
            raise ValidationError("prompt has no tokens")
        return token_ids

    def _check_tools(self, request: EngineCoreRequest) -> None:
        """Refuse tools that the model would not see. A grammar shows it their names and arguments as it writes them.

        Raises:
            ValidationError: the chat template does not use the tools, and no grammar contains them.
        """
        params = request.sampling_params
        has_grammar = params is not None and params.structured_outputs is not None
        if (request.chat_template_kwargs or {}).get("tools") and not has_grammar and not self._codec.can_show_tools:
            raise ValidationError(
                "tools: the chat template of this model cannot show tools to it; serve a model whose template can, "
                "force a call by tool_choice 'required', or leave tools out and describe them in a message"
            )

    async def _encode(
        self, request: EngineCoreRequest, text: str, cut: Cut | None, *, add_special_tokens: bool
    ) -> list[int]:
        check = partial(
            check_prompt_length, max_model_len=self._max_model_len, is_pooled=request.pooling_params is not None
        )
        if cut is None:
            check(self._codec.min_num_tokens(text), is_lower_bound=True)
        encode = partial(self._codec.encode, text, add_special_tokens=add_special_tokens, cut=cut, check_length=check)
        return await self._thread.run(encode, len(text))

    def _truncation(self, request: EngineCoreRequest) -> Cut | None:
        """Return how the prompt is truncated; None if it is not."""
        max_tokens, params = request.truncate_prompt_tokens, request.sampling_params
        if max_tokens is None:
            return None
        if request.prompt_embeds is not None:
            raise UnsupportedParameterError("truncate_prompt_tokens needs a prompt of tokens, not of embeddings")
        if request.images:
            raise UnsupportedParameterError("truncate_prompt_tokens: a prompt with images cannot be cut; leave it out")
        if request.resumable:
            raise UnsupportedParameterError(
                "truncate_prompt_tokens: a resumable request's prompt comes in parts; leave it at None"
            )
        num_output_tokens = 0 if request.pooling_params is not None or params is None else params.max_tokens or 1
        side = None if request.tokenization is None else request.tokenization.truncation_side
        return Cut(num_kept(max_tokens, self._max_model_len, num_output_tokens), side or LEFT)
