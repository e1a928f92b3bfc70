"""The web app's side: enqueue requests, stream or await their results.

    from penstock.producer import Client, SamplingParams

    async with Client.connect("redis://localhost") as client:
        async for delta in client.stream("four plus two is", SamplingParams(max_tokens=20)):
            print(delta.text, end="")

Needs redis, msgspec and structlog; imports no torch and no transformers.
"""

from ..shared.control.engine import SleepState
from ..shared.deployment.records import ModelCard
from ..shared.errors import EngineCallError, EngineDeadError, PenstockError, PoisonRequestError
from ..shared.messages.deltas import Delta
from ..shared.messages.outcome import FinishReason, TokenLogprobs
from ..shared.params.kinds import RequestOutputKind
from ..shared.params.lora import LoRARequest
from ..shared.params.pooling import PoolingParams
from ..shared.params.sampling import RepetitionDetectionParams, SamplingParams
from ..shared.params.structured import StructuredOutputsParams
from ..shared.queue.lifecycle import RequestState
from ..shared.stats import EngineStats, RequestStats
from .beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
from .blocking.llm import LLM
from .client import Client
from .client_parts.detached import RequestHandle
from .control.engine_view import Counter, Gauge, Histogram, Metric
from .control.queue_control import PauseMode
from .inputs.prompt import Prompt
from .inputs.streaming_input import StreamingInput
from .io_processors import IOProcessor
from .requests.conversation import Conversation
from .results import (
    ClassificationRequestOutput,
    CompletionOutput,
    DataPrompt,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ProcessedRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
    TextPair,
)

__all__ = [
    "LLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "ClassificationRequestOutput",
    "Client",
    "CompletionOutput",
    "Conversation",
    "Counter",
    "DataPrompt",
    "Delta",
    "EmbeddingRequestOutput",
    "EngineCallError",
    "EngineDeadError",
    "EngineStats",
    "FinishReason",
    "Gauge",
    "Histogram",
    "IOProcessor",
    "LoRARequest",
    "Metric",
    "ModelCard",
    "PauseMode",
    "PenstockError",
    "PoisonRequestError",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "ProcessedRequestOutput",
    "Prompt",
    "RepetitionDetectionParams",
    "RequestHandle",
    "RequestOutput",
    "RequestOutputKind",
    "RequestState",
    "RequestStats",
    "SamplingParams",
    "ScoringRequestOutput",
    "SleepState",
    "StreamingInput",
    "StructuredOutputsParams",
    "TextPair",
    "TokenLogprobs",
]
