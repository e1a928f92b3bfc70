# pyright: reportMissingImports=false
# (vLLM is installed in a separate environment.)
"""Models that pool, in vLLM's runner "pooling". A request ends with its only output, and nothing of it is resumed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from ....shared.errors import UnsupportedParameterError
from ....shared.messages.core import EngineCoreOutput
from ....shared.messages.requests import EngineCoreRequest
from ....shared.params.kinds import POOLING_TASKS
from ....shared.params.pooling import PoolingSetup
from ...engine.scheduling.request import Request
from ...models.pooling.folder import labels_of, read_prompts
from ..checked_request import checked_pooling_request
from .conversion import pooled_of, vllm_pooling_params
from .core import VllmCore
from .vllm_request import VllmRequests


def served_pooling_tasks(engine: Any) -> tuple[str, ...]:
    """Return the tasks of the loaded model that clients can name; the one that vLLM chooses for it is the first.

    Args:
        engine: ``vllm.v1.engine.core.EngineCore``.
    """
    supported = engine.get_supported_tasks()
    own = engine.vllm_config.model_config.get_pooling_task(supported)
    return tuple(sorted(set(supported) & set(POOLING_TASKS), key=lambda task: (task != own, task)))


def pooling_setup(model: Any, tasks: tuple[str, ...], folder: Path) -> PoolingSetup:
    """Return the facts about a model for clients.

    Args:
        model: vLLM's ``ModelConfig``.
    """
    prompts, default_prompt_name = read_prompts(folder)
    embeds = any(task.endswith("embed") for task in tasks)
    sizes = model.matryoshka_dimensions or (None if model.is_matryoshka else ())
    return PoolingSetup(
        dimensions=model.embedding_size if embeds else 0,
        matryoshka_dimensions=None if sizes is None else tuple(sizes),
        labels=() if embeds else labels_of(model.hf_config, model.hf_config.num_labels),
        prompts=prompts,
        default_prompt_name=default_prompt_name,
    )


class VllmPoolingRequests(VllmRequests):
    """Converter of requests to a model that has these ``tasks``; see ``VllmRequests``."""

    def __init__(self, tasks: tuple[str, ...], engine: Any, inputs: Any, adapter_of: Callable[[Request], Any]) -> None:
        super().__init__(engine, inputs, adapter_of)
        self._own_task = tasks[0]
        self._distinguishes_texts = getattr(inputs.model_config.hf_config, "type_vocab_size", 1) > 1

    def make_theirs(self, message: EngineCoreRequest, request: Request) -> tuple[Any, Future[Any] | None]:
        """Return vLLM's ``Request``, which has no grammar; raises as ``VllmRequests.make_theirs``."""
        from vllm.pooling_params import PoolingParams

        assert message.pooling_params is not None  # checked
        arguments = vllm_pooling_params(message.pooling_params, self._own_task, self._token_types(message, request))
        theirs = self._processed(message, request, lambda: PoolingParams(**arguments))
        return self._engine.preprocess_add_request(theirs)[0], None

    def _token_types(self, message: EngineCoreRequest, request: Request) -> Any:
        from vllm.entrypoints.pooling.scoring.utils import compress_token_type_ids
        from vllm.model_executor.model_loader.utils import get_model_cls

        begin = message.second_text_at
        if begin is None or not self._distinguishes_texts:
            return None
        model = get_model_cls(self._inputs.model_config)
        if "token_type_ids" not in inspect.signature(model.forward).parameters:
            raise UnsupportedParameterError(
                f"text_pair: vLLM's {model.__name__} does not distinguish the two texts as the model was trained to; "
                "send one text"
            )
        return compress_token_type_ids([0] * begin + [1] * (request.num_prompt_tokens - begin))


class VllmPoolingCore(VllmCore):
    """A ``VllmCore`` of a model that has these ``tasks``."""

    def __init__(self, tasks: tuple[str, ...], setup: PoolingSetup, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._tasks = tasks
        self._setup = setup

    def _checked_message(self, message: EngineCoreRequest) -> Request:
        self._adapters.check(message.lora_request)
        return checked_pooling_request(
            message, self._tasks, self._setup, max_model_len=self._max_model_len, vocab_size=self._vocab_size
        )

    def _our_output(self, theirs: Any) -> EngineCoreOutput | None:
        output = super()._our_output(theirs)
        if output is not None and theirs.pooling_output is not None:
            output.pooled = pooled_of(theirs.pooling_output)
        return output
