"""Spans of requests, for OpenTelemetry: one trace from the HTTP request to each engine that worked on it.

A process with an endpoint exports to it, by the extra ``otel`` (ops/decisions/observability.md). Other
processes do not load ``opentelemetry``; only ``provider`` and ``spans`` import it. No span holds text of a prompt or an
answer.
"""
