"""Ordering policies of an operator's own: who goes first in an engine, and is preempted last.

A policy is a class that ``worker start --scheduling-policy my_module:ShortestFirst`` names, or an installed plug-in::

    from penstock.worker.engine.own_ordering import RequestOrder

    class ShortestFirst(RequestOrder):
        def key(self, request):
            return request.max_output_tokens

It is asked once for each request, when that comes to the engine, so a request's place never changes under the
scheduler. Requests with the same key go in the order in which they came.
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
    """A policy raised, or gave no key. The fault of neither the request nor its engine."""


@dataclass(frozen=True)
class OrderedRequest:
    """What a policy is told of a request.

    Args:
        priority: as its caller gave it; the lower, the more urgent.
        num_output_tokens: those that a former engine has delivered.
        max_output_tokens: how many it may have in all.
        adapter: the name of its adapter; "" for the model alone.
        num_images: those of its prompt.
    """

    request_id: str
    priority: int
    num_prompt_tokens: int
    num_output_tokens: int
    max_output_tokens: int
    adapter: str
    num_images: int


class RequestOrder(ABC):
    """Says which requests go before others. One for each engine, made when it starts; called in its thread."""

    @abstractmethod
    def key(self, request: OrderedRequest) -> float | Sequence[float]:
        """Return a number, or several of which the first that differs counts; the lowest goes first.

        Raises: whatever it likes; the request then ends with an error that tells it.
        """


@dataclass(frozen=True)
class Ordering:
    """How an engine orders: the scheduler's policy, and what to ask of each request that comes (see ``rank``)."""

    policy: OrderingPolicy
    rank: Callable[[Request], Key]


def nothing_to_rank(request: Request) -> Key:
    """What is asked where the policy is one of the project's, which look at the request itself."""
    return ()


def load_ordering(name: str) -> Ordering:
    """Return the ordering that an operator has named: ``fcfs``, ``priority``, a plug-in, or ``MODULE:CLASS``.

    Raises:
        ConfigurationError: it cannot be imported or made, or is no policy.
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
    except Exception as error:  # whatever its code raises
        raise ConfigurationError(
            f"--scheduling-policy {name} cannot be made: {type(error).__name__}: {error}"
        ) from error
    return Ordering(ByOrderKey(), lambda request: _key_of(order, name, request))


def _key_of(order: RequestOrder, name: str, request: Request) -> Key:
    """The key, as numbers that can be compared with any other's.

    Raises:
        OrderingFailedError: there is none.
    """
    told = OrderedRequest(
        request_id=request.request_id,
        priority=request.priority,
        num_prompt_tokens=request.num_prompt_tokens,
        num_output_tokens=request.num_output_tokens,
        max_output_tokens=request.max_output_tokens,
        adapter="" if request.lora_request is None else request.lora_request.lora_name,
        num_images=len(request.images),
    )
    try:
        said = order.key(told)
        numbers = tuple(said) if isinstance(said, Sequence) else (said,)
    except BaseException as error:  # whatever its author raises
        raise OrderingFailedError(f"the ordering policy {name} raised {type(error).__name__}: {error}") from error
    if not all(isinstance(number, int | float) and not math.isnan(number) for number in numbers):
        raise OrderingFailedError(f"the ordering policy {name} must give numbers that are not NaN, got {shown(said)}")
    return numbers
