# pyright: reportMissingImports=false
# (vLLM is installed in a separate environment.)
"""Convert our requests to vLLM's, with the checks of vLLM's front end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from ....shared.errors import ValidationError
from ....shared.messages.requests import EngineCoreRequest
from ...engine.scheduling.request import Request
from .conversion import cache_salt_of, grammar_of, vllm_params


class VllmRequests:
    """Converter that has vLLM check and prepare each request.

    Args:
        engine: ``vllm.v1.engine.core.EngineCore``.
        inputs: ``vllm.v1.engine.input_processor.InputProcessor``.
        adapter_of: returns vLLM's ``LoRARequest`` for a request; None for the base model.
    """

    def __init__(self, engine: Any, inputs: Any, adapter_of: Callable[[Request], Any]) -> None:
        self._adapter_of = adapter_of
        self._engine = engine
        self._inputs = inputs
        self._tasks = engine.get_supported_tasks()
        self.vocab_size: int = inputs.model_config.get_vocab_size()

    def make_theirs(self, message: EngineCoreRequest, request: Request) -> tuple[Any, Future[Any] | None]:
        """Return vLLM's ``Request``, and its grammar, which is being compiled; None without one.

        Args:
            request: checked request of ``message``, with the delivered tokens.

        Raises:
            ValidationError: vLLM refuses the request.
        """
        delivered = request.token_ids[request.num_prompt_tokens :]
        theirs = self._processed(message, request, lambda: _sampling_params(request, len(delivered)))
        # vLLM's front end stores the tokens of bad words here; the worker process has computed them.
        theirs.sampling_params._bad_words_token_ids = request.params.bad_words_token_ids or None
        prepared, _ = self._engine.preprocess_add_request(theirs)
        if prepared.structured_output_request is None:
            return prepared, None
        grammar = prepared.structured_output_request._grammar
        if delivered:
            grammar = _advanced(grammar, request.request_id, delivered)
            prepared.structured_output_request.grammar = grammar
        return prepared, grammar

    def _processed(self, message: EngineCoreRequest, request: Request, make_params: Callable[[], Any]) -> Any:
        """Return vLLM's ``EngineCoreRequest`` with the parameters of ``make_params``; raises as ``make_theirs``."""
        try:
            return self._inputs.process_inputs(
                request.request_id,
                _token_input(request.token_ids, cache_salt_of(message)),
                make_params(),
                self._tasks,
                arrival_time=message.arrival_time or time.time(),
                lora_request=self._adapter_of(request),
                priority=message.priority,
            )
        except Exception as error:  # from vLLM's checks, pydantic or a grammar library; nothing is started yet
            raise ValidationError(f"vLLM refuses the request: {error}") from error


def _token_input(token_ids: Sequence[int], cache_salt: str) -> Any:
    from vllm.inputs.engine import tokens_input

    return tokens_input(list(token_ids), cache_salt=cache_salt)


def _sampling_params(request: Request, num_delivered: int) -> Any:
    from vllm.sampling_params import SamplingParams, StructuredOutputsParams

    arguments = vllm_params(request.params, num_delivered)
    if request.params.structured_outputs is not None:
        arguments["structured_outputs"] = StructuredOutputsParams(**grammar_of(request.params.structured_outputs))
    return SamplingParams(**arguments)


def _advanced(compiled: Future[Any], request_id: str, delivered: list[int]) -> Future[Any]:
    """Return a future of the grammar, advanced over the delivered tokens. vLLM schedules the request after it."""
    ready: Future[Any] = Future()

    def advance(done: Future[Any]) -> None:
        try:
            grammar = done.result()
            if not grammar.accept_tokens(request_id, delivered):
                raise ValueError("it does not accept the tokens that were delivered")
        except BaseException as error:  # any exception of the library is reported to the caller
            ready.set_exception(error)
        else:
            ready.set_result(grammar)

    compiled.add_done_callback(advance)
    return ready
