"""The control methods of the client, for callers that block."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

from ...shared.errors import EngineDeadError
from ..client import Client

P = ParamSpec("P")
T = TypeVar("T")


def _blocking(method: Callable[Concatenate[Client, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[Any, P], T]:
    """Return ``method`` as a method of ``LLMControl``: same arguments, result and docstring, but blocking."""

    @functools.wraps(method)
    def call(self: LLMControl, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.call(method(self._client, *args, **kwargs))

    return call


class LLMControl(ABC):
    """The part of ``LLM`` for engines, queues and models: the methods of ``Client``, blocking."""

    @property
    @abstractmethod
    def _client(self) -> Client:
        """The client that runs the methods."""

    @abstractmethod
    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` on the client's loop and wait for it."""

    abort = _blocking(Client.abort)
    beam_search = _blocking(Client.beam_search)

    score = _blocking(Client.score)

    adapters = _blocking(Client.adapters)
    add_lora = _blocking(Client.add_lora)
    check_invariants = _blocking(Client.check_invariants)
    collective_rpc = _blocking(Client.collective_rpc)
    execute_dummy_batch = _blocking(Client.execute_dummy_batch)
    is_sleeping = _blocking(Client.is_sleeping)
    list_loras = _blocking(Client.list_loras)
    pin_lora = _blocking(Client.pin_lora)
    register_lora = _blocking(Client.register_lora)
    load_registered = _blocking(Client.load_registered)
    reload_weights = _blocking(Client.reload_weights)
    remove_lora = _blocking(Client.remove_lora)
    reset_encoder_cache = _blocking(Client.reset_encoder_cache)
    reset_mm_cache = _blocking(Client.reset_mm_cache)
    reset_prefix_cache = _blocking(Client.reset_prefix_cache)
    save_sharded_state = _blocking(Client.save_sharded_state)
    sleep = _blocking(Client.sleep)
    sleep_state = _blocking(Client.sleep_state)
    start_profile = _blocking(Client.start_profile)
    stop_profile = _blocking(Client.stop_profile)
    unpin_lora = _blocking(Client.unpin_lora)
    visible_adapters = _blocking(Client.visible_adapters)
    wake_up = _blocking(Client.wake_up)

    scale_elastic_ep = _blocking(Client.scale_elastic_ep)

    drain_worker = _blocking(Client.drain_worker)
    scale_worker = _blocking(Client.scale_worker)
    stop_worker = _blocking(Client.stop_worker)

    detokenize = _blocking(Client.detokenize)
    get_tokenizer = _blocking(Client.get_tokenizer)
    tokenize = _blocking(Client.tokenize)

    check_health = _blocking(Client.check_health)
    do_log_stats = _blocking(Client.do_log_stats)
    engines = _blocking(Client.engines)
    find_model = _blocking(Client.find_model)
    forget_model = _blocking(Client.forget_model)
    get_metrics = _blocking(Client.get_metrics)
    get_model_config = _blocking(Client.get_model_config)
    get_supported_tasks = _blocking(Client.get_supported_tasks)
    is_tracing_enabled = _blocking(Client.is_tracing_enabled)
    models = _blocking(Client.models)
    resolve_model = _blocking(Client.resolve_model)

    cancel_requests = _blocking(Client.cancel_requests)
    count_requests = _blocking(Client.count_requests)
    find_request = _blocking(Client.find_request)
    history = _blocking(Client.history)
    last_event_id = _blocking(Client.last_event_id)
    replay_requests = _blocking(Client.replay_requests)
    request_events = _blocking(Client.request_events)
    requests = _blocking(Client.requests)
    retry_requests = _blocking(Client.retry_requests)

    configure_queue = _blocking(Client.configure_queue)
    configure_tenant = _blocking(Client.configure_tenant)
    get_num_unfinished_requests = _blocking(Client.get_num_unfinished_requests)
    is_paused = _blocking(Client.is_paused)
    pause_generation = _blocking(Client.pause_generation)
    purge = _blocking(Client.purge)
    queue_history = _blocking(Client.queue_history)
    queue_policy = _blocking(Client.queue_policy)
    queue_stats = _blocking(Client.queue_stats)
    resume_generation = _blocking(Client.resume_generation)
    status = _blocking(Client.status)
    wait_for_requests_to_drain = _blocking(Client.wait_for_requests_to_drain)

    @property
    def errored(self) -> bool:
        """Same as ``Client.errored``."""
        return self._client.errored

    @property
    def dead_error(self) -> EngineDeadError:
        """Same as ``Client.dead_error``."""
        return self._client.dead_error

    @property
    def is_running(self) -> bool:
        """Same as ``Client.is_running``."""
        return self._client.is_running

    @property
    def is_stopped(self) -> bool:
        """Same as ``Client.is_stopped``."""
        return self._client.is_stopped
