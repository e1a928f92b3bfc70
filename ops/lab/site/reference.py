"""The generated pages of the reference."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from enum import EnumType

from .... import producer
from ....producer import LLM, Client
from ....producer.blocking.llm_control import LLMControl
from . import commands, endpoints, errors

PACKAGE = "penstock.producer"
# Headings of the parts of ``Client``, in the order of the page.
CLIENT_PARTS = {
    "Generations": "Generate while the caller listens",
    "DetachedRequests": "Detached requests",
    "Poolings": "Embeddings, classes and scores",
    "BeamSearches": "Beam search",
    "TextControl": "Tokens",
    "ModelView": "Models",
    "AdapterControl": "Adapters",
    "QueueControl": "Queues",
    "RequestView": "Requests of all clients",
    "EngineView": "State of engines",
    "EngineControl": "Control of engines",
    "WeightsControl": "Weights",
    "WorkerControl": "Workers",
    "GroupControl": "Data-parallel groups",
}
OPTIONS = (
    "penstock.producer.inputs.options.SharedOptions",
    "penstock.producer.inputs.options.RequestOptions",
    "penstock.producer.requests.single_requests.FollowOptions",
    "penstock.producer.client_parts.core.CallOptions",
    "penstock.producer.client.ClientOptions",
)
PARAMETERS = (
    "SamplingParams",
    "StructuredOutputsParams",
    "RepetitionDetectionParams",
    "BeamSearchParams",
    "PoolingParams",
    "LoRARequest",
    "Prompt",
    "TextPair",
    "DataPrompt",
    "StreamingInput",
    "IOProcessor",
    "PauseMode",
)
RESULTS = (
    "RequestOutput",
    "CompletionOutput",
    "Delta",
    "RequestHandle",
    "Conversation",
    "FinishReason",
    "RequestState",
    "TokenLogprobs",
    "BeamSearchOutput",
    "BeamSearchSequence",
    "PoolingRequestOutput",
    "EmbeddingRequestOutput",
    "ClassificationRequestOutput",
    "ScoringRequestOutput",
    "ProcessedRequestOutput",
    "PoolingOutput",
    "RequestStats",
    "EngineStats",
    "Metric",
    "Counter",
    "Gauge",
    "Histogram",
    "ModelCard",
    "SleepState",
    "RequestOutputKind",
)


def pages() -> Iterator[tuple[str, str]]:
    """Yield the path and the Markdown of each page."""
    for name, lines in (
        ("client", _client()),
        ("llm", _llm()),
        (
            "request_options",
            _classes(
                "Options of calls",
                "Keyword arguments of calls, in the dictionaries that their signatures name.",
                (),
                OPTIONS,
            ),
        ),
        ("parameters", _classes("Parameters", f"Arguments of requests. All classes are in `{PACKAGE}`.", PARAMETERS)),
        ("results", _classes("Results", f"Return values of calls. All classes are in `{PACKAGE}`.", RESULTS)),
        ("errors", errors.lines()),
        ("http", endpoints.endpoints()),
        ("http_objects", endpoints.objects()),
        ("options", commands.lines()),
    ):
        yield f"reference/{name}.md", "\n".join(lines)


def _client() -> Iterator[str]:
    yield from ("# Client", "", *_directive(f"{PACKAGE}.Client"))
    parts = {part.__name__: part for part in Client.__mro__[1:] if any(_public(part))}
    assert parts.keys() == CLIENT_PARTS.keys()
    for name, heading in CLIENT_PARTS.items():
        part = parts[name]
        yield from (f"## {heading}", "", *_directive(f"{part.__module__}.{name}"))


def _llm() -> Iterator[str]:
    yield from ("# LLM", "", *_directive(f"{PACKAGE}.LLM"))
    stepped = LLM.__mro__[1]
    yield from ("## Step by step", "", *_directive(f"{stepped.__module__}.{stepped.__name__}"))
    yield from (
        "## Methods of Client",
        "",
        "These methods of [Client](client.md) block until they have their result:",
        "",
    )
    yield ", ".join(f"`{name}`" for name in sorted(_public(LLMControl))) + "."


def _classes(title: str, summary: str, names: Sequence[str], others: Sequence[str] = ()) -> Iterator[str]:
    """Yield a page of classes of the package, and of others by their paths."""
    yield from (f"# {title}", "", summary, "")
    for path in (*others, *(f"{PACKAGE}.{name}" for name in names)):
        yield from _directive(path, show_root_heading=True, heading_level=2, show_root_toc_entry=True)


def _public(kind: type) -> Iterator[str]:
    return (name for name in vars(kind) if not name.startswith("_"))


def _directive(path: str, **options: object) -> Iterator[str]:
    # The values of an enumeration have no docstrings.
    if isinstance(getattr(producer, path.rpartition(".")[2], None), EnumType):
        options |= {"show_if_no_docstring": True, "show_labels": False}
    yield from (f"::: {path}", f"    options: {json.dumps(options)}", "")
