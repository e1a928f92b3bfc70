"""Figures for Prometheus: what the gateway counts itself."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ...shared.buckets import FIRST_TOKEN_TIME_S, REQUEST_TIME_S


class Metrics:
    """The gateway's own counts. ``route`` is the path of the route, not of the request, so that there are few."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        self.requests = Counter(
            "penstock_http_requests", "HTTP requests answered", ["route", "method", "status"], registry=self.registry
        )
        self.latency = Histogram(
            "penstock_http_request_duration_seconds",
            "From the request's head to the end of its response",
            ["route"],
            buckets=REQUEST_TIME_S,
            registry=self.registry,
        )
        self.first_chunk = Histogram(
            "penstock_http_time_to_first_chunk_seconds",
            "From the request's head to the first chunk of a stream",
            ["route"],
            buckets=FIRST_TOKEN_TIME_S,
            registry=self.registry,
        )
        self.in_flight = Gauge("penstock_http_requests_in_flight", "HTTP requests under way", registry=self.registry)
        self.resumed = Counter(
            "penstock_http_streams_resumed", "Streams picked up with Last-Event-ID", registry=self.registry
        )

    def render(self) -> bytes:
        """Return them as text."""
        return generate_latest(self.registry)
