"""Custom ordering policies: which requests run first in an engine, and are preempted last.

A policy is a class that ``worker start --scheduling-policy my_module:ShortestFirst`` names, or an installed plug-in::

    from penstock.worker.engine.own_ordering import RequestOrder

    class ShortestFirst(RequestOrder):
        def key(self, request):
            return request.max_output_tokens

It is called once per request, when the request arrives at the engine, so the order never changes while requests wait.
Requests with the same key run in order of arrival.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...shared.errors import ConfigurationError
from ...shared.process.plugins import ORDERING_POLICIES, load_object
from ...shared.values.shown import shown
from .scheduling.ordering import ByOrderKey, FirstComeFirstServed, OrderingPolicy, Priority
from .scheduling.request import Request

ORDERING_FAILED = "ordering_policy_failed"
Key = tuple[float, ...]


class OrderingFailedError(Exception):
    """A policy raised, or returned no valid key. Neither the request nor its engine is the cause."""


@dataclass(frozen=True)
class OrderedRequest:
    """The properties of a request that a policy can use.

    Args:
        priority: as set by the caller; the lower, the more urgent.
        num_output_tokens: tokens that a former engine has delivered.
        max_output_tokens: limit of output tokens in total.
        adapter: name of its adapter; "" for none.
        num_images: number of images in its prompt.
    """

    request_id: str
    priority: int
    num_prompt_tokens: int
    num_output_tokens: int
    max_output_tokens: int
    adapter: str
    num_images: int


class RequestOrder(ABC):
    """Orders requests. Each engine creates one when it starts, and calls it in its main thread."""

    @abstractmethod
    def key(self, request: OrderedRequest) -> float | Sequence[float]:
        """Return a number, or several of which the first that differs counts; the lowest goes first.

        Raises: any exception; the request then ends with an error that contains its message.
        """


@dataclass(frozen=True)
class Ordering:
    """The ordering of an engine: the scheduler's policy, and the function that returns the key of a new request."""

    policy: OrderingPolicy
    rank: Callable[[Request], Key]


def nothing_to_rank(request: Request) -> Key:
    """Return an empty key, for the built-in policies, which read the request itself."""
    return ()


def load_ordering(name: str) -> Ordering:
    """Return the ordering that an operator has named: ``fcfs``, ``priority``, a plug-in, or ``MODULE:CLASS``.

    Raises:
        ConfigurationError: it cannot be imported or created, or is not a policy.
    """
    if name == "fcfs":
        return Ordering(FirstComeFirstServed(), nothing_to_rank)
    if name == "priority":
        return Ordering(Priority(), nothing_to_rank)
    kind = load_object(ORDERING_POLICIES, name)
    if not isinstance(kind, type) or not issubclass(kind, RequestOrder):
        raise ConfigurationError(f"--scheduling-policy {name} must be a subclass of RequestOrder, got {shown(kind)}")
    try:
        order = kind()
    except Exception as error:  # anything that its code raises
        raise ConfigurationError(
            f"--scheduling-policy {name} cannot be made: {type(error).__name__}: {error}"
        ) from error
    return Ordering(ByOrderKey(), lambda request: _key_of(order, name, request))


def _key_of(order: RequestOrder, name: str, request: Request) -> Key:
    """Return the key of ``request`` as a tuple of numbers, which can be compared.

    Raises:
        OrderingFailedError: the policy raised or returned no valid key.
    """
    ordered = OrderedRequest(
        request_id=request.request_id,
        priority=request.priority,
        num_prompt_tokens=request.num_prompt_tokens,
        num_output_tokens=request.num_output_tokens,
        max_output_tokens=request.max_output_tokens,
        adapter="" if request.lora_request is None else request.lora_request.lora_name,
        num_images=len(request.images),
    )
    try:
        key = order.key(ordered)
        numbers = tuple(key) if isinstance(key, Sequence) else (key,)
    except BaseException as error:  # anything that its author raises
        raise OrderingFailedError(f"the ordering policy {name} raised {type(error).__name__}: {error}") from error
    if not all(isinstance(number, int | float) and not math.isnan(number) for number in numbers):
        raise OrderingFailedError(f"the ordering policy {name} must give numbers that are not NaN, got {shown(key)}")
    return numbers
