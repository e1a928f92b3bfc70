"""The engine core of a pooling model. A request ends once its prompt is computed."""

from __future__ import annotations

from typing import Any

from ....shared.errors import UnsupportedParameterError, ValidationError
from ....shared.messages.requests import EngineCoreRequest
from ...models.pooling.pooler import PoolingModel
from ...request_checks import check_prompt_length, check_result_size, check_served, check_task
from ..execution.pooling_runner import pooler_of
from ..sampling.param_checks import check_in_vocabulary
from ..scheduling.prompt_inputs import ImageSpan, extra_keys_of
from ..scheduling.request import Pooling, Request
from .engine_core import EngineCore


class PoolingCore(EngineCore):
    """An ``EngineCore`` that serves the tasks of ``pooling``."""

    def __init__(self, pooling: PoolingModel, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._pooling = pooling

    def _make_request(self, message: EngineCoreRequest, images: tuple[ImageSpan, ...] = ()) -> Request:
        check_task(message, self._pooling.tasks)
        self._adapters.check(message.lora_request)
        params, prompt = message.pooling_params, message.prompt_token_ids or []
        assert params is not None  # since generate is not one of its tasks
        if message.prompt_embeds is not None:
            raise UnsupportedParameterError(
                "prompt_embeds: a pooling model takes only text or token ids; leave prompt_embeds out"
            )
        if not prompt:
            raise ValidationError("prompt_token_ids is empty")
        self._pooling.check(params)
        max_model_len = self.scheduler.max_model_len
        check_prompt_length(len(prompt), max_model_len, is_pooled=True)
        check_in_vocabulary("prompt_token_ids", prompt, self._vocab_size)
        pooler = pooler_of(self._pooling, params)
        if pooler.is_per_token:
            check_result_size(len(prompt), params, self._pooling.setup)
        reads = pooler.reads_prefix_cache and not params.skip_reading_prefix_cache
        return Request(
            message.request_id,
            prompt,
            check_served(message),
            max_model_len=max_model_len,
            priority=message.priority,
            extra_keys=extra_keys_of(message),
            lora_request=message.lora_request,
            pooling=Pooling(params, reads, message.second_text_at if self._pooling.distinguishes_texts else None),
        )
