"""Ordering policies as an operator may write them, for the tests; some of them are wrong."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.worker.engine.own_ordering import OrderedRequest, RequestOrder


class ShortestFirst(RequestOrder):
    """The more urgent, then the less to do."""

    def key(self, request: OrderedRequest) -> Sequence[float]:
        return request.priority, request.max_output_tokens - request.num_output_tokens


class Broken(RequestOrder):
    """Fails for two requests, each in a way of its own."""

    def key(self, request: OrderedRequest) -> float:
        if request.request_id == "raises":
            raise KeyError("no such thing")
        return float("nan") if request.request_id == "nan" else 0.0


class NoPolicy:
    """Cannot be chosen."""


class NotMade(RequestOrder):
    """Fails when the engine starts."""

    def __init__(self) -> None:
        raise RuntimeError("no licence")

    def key(self, request: OrderedRequest) -> float:
        return 0.0
