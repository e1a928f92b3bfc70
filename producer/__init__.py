"""The web app's side: enqueue requests, stream or await their results.

    from penstock.producer import Client, SamplingParams

    async with Client.connect("redis://localhost") as client:
        async for delta in client.stream("four plus two is", SamplingParams(max_tokens=20)):
            print(delta.text, end="")

Needs redis, msgspec and structlog; imports no torch and no transformers.
"""

from ..shared.control import SleepState
from ..shared.errors import EngineCallError, EngineDeadError, PenstockError, PoisonRequestError
from ..shared.messages import Delta, FinishReason, TokenLogprobs
from ..shared.params import (
    LoRARequest,
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from ..shared.pooling import PoolingParams
from ..shared.records import ModelCard
from ..shared.request_state import RequestState
from ..shared.stats import EngineStats, RequestStats
from .beams import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
from .client import Client
from .control.metrics import Counter, Gauge, Histogram, Metric
from .control.queue_control import PauseMode
from .handle import RequestHandle
from .llm import LLM
from .outputs import CompletionOutput, RequestOutput
from .pooling import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
    TextPair,
)
from .prompt import Prompt
from .requests.conversation import Conversation
from .streaming_input import StreamingInput

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
    "Delta",
    "EmbeddingRequestOutput",
    "EngineCallError",
    "EngineDeadError",
    "EngineStats",
    "FinishReason",
    "Gauge",
    "Histogram",
    "LoRARequest",
    "Metric",
    "ModelCard",
    "PauseMode",
    "PenstockError",
    "PoisonRequestError",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
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
