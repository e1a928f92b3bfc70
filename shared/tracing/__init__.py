"""Spans of requests, for OpenTelemetry: one trace from the HTTP request to each engine that worked on it.

Who is told an endpoint exports to it, by the extra ``penstock[otel]`` (decision 0068). Nobody else loads
``opentelemetry``: ``provider`` and ``spans`` alone do here. No span holds anything of a prompt or an answer.
"""
