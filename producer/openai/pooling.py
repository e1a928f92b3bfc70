"""Bodies for pooling models (/v1/embeddings, /classify, /pooling, /score, /rerank), their requests and responses."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any, Generic, Literal, Protocol, TypeVar

import msgspec

from ...shared.errors import ClientClosedError
from ...shared.messages.outcome import Usage as TokenCounts
from ...shared.params.pooling import Pooled, PoolingParams
from ..inputs.options import RequestOptions
from ..inputs.prompt import Prompt
from ..results import DataPrompt, PoolingOutput, PoolingRequestOutput, RequestOutput
from .answers.common import created_at, finish_reason_of
from .errors import bad_field
from .generation_body import plain_options
from .prepared import PreparedBody

T = TypeVar("T")
MAX_INPUTS = 2048
Input = str | list[str | int | list[int]]
ID_PREFIX = "embd"


class PoolingBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields with the same meaning in all pooling bodies. The default of each is null.

    ``use_activation``, ``priority``, ``cache_salt`` and the truncation are vLLM's; ``prompt_name``, ``band`` and
    ``timeout_s`` are Penstock's. ``user`` has no effect on a self-hosted server.
    """

    model: str | None = None
    user: str | None = None
    use_activation: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    prompt_name: str | None = None
    band: str | None = None
    timeout_s: float | None = None

    def pooling_params(self, task: str | None, **endpoint_params: Any) -> PoolingParams:
        """Return the pooling parameters of the body.

        Raises:
            ValidationError: a value is out of range; the message names the field.
        """
        return PoolingParams(
            task=task, use_activation=self.use_activation, prompt_name=self.prompt_name, **endpoint_params
        )

    def prepared(self, id_prefix: str, inputs: Input, params: PoolingParams) -> PreparedPooling:
        """Return the requests for ``inputs``, the body's ``input``. Raises: as ``inputs_of``."""
        prompts = inputs_of(inputs)
        # The client names a single prompt without a number, but the body may have it in a list.
        is_only_item = prompts is inputs and len(prompts) == 1
        return PreparedPooling(
            id_prefix=id_prefix,
            prompts=prompts,
            params=params,
            options=self.request_options(),
            fields={"prompt": "input[0]" if is_only_item else "input"},
        )

    def request_options(self) -> RequestOptions:
        """Return the options of the requests other than prompt and parameters."""
        return plain_options(self)


class PreparedPooling(PreparedBody, kw_only=True, frozen=True):
    """A checked body of a pooling endpoint."""

    params: PoolingParams


class _Counted(Protocol):
    @property
    def usage(self) -> TokenCounts | None: ...


class PoolingUsage(msgspec.Struct):
    """Number of tokens of all texts of one response."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0

    @classmethod
    def sum_of(cls, outputs: Sequence[_Counted]) -> PoolingUsage:
        """Return the sum over ``outputs``."""
        num_tokens = sum(output.usage.num_prompt_tokens for output in outputs if output.usage is not None)
        return cls(num_tokens, num_tokens)


class ClassifyBody(PoolingBody, kw_only=True, forbid_unknown_fields=True):
    """The request of /classify."""

    input: Input


class Listed(msgspec.Struct, Generic[T], kw_only=True):
    """A response with one result per text or pair, in order."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[T]
    usage: PoolingUsage


class Classification(msgspec.Struct):
    """The most probable class of one text, and the probabilities of all classes."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class Classifications(Listed[Classification], kw_only=True):
    """The response of /classify."""


class ScoreBody(PoolingBody, kw_only=True, forbid_unknown_fields=True):
    """The request of /score: one text against others, or pairs of two equally long lists. ``queries`` and ``documents``
    are aliases of ``text_1`` and ``text_2``."""

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None

    def pairs(self) -> tuple[str | list[str], str | list[str]]:
        """Return both sides.

        Raises:
            OpenAIError: 400, a side is missing, passed twice, empty or too long.
        """
        return _side(self, "text_1", "queries"), _side(self, "text_2", "documents")

    def names(self) -> dict[str, str]:
        """Return the names that the body uses for the two sides, keyed by the parameters of ``Client.score``."""
        return {
            "texts": "text_1" if self.queries is None else "queries",
            "others": "text_2" if self.documents is None else "documents",
        }


class Score(msgspec.Struct):
    """The similarity of the texts of one pair."""

    index: int
    score: float
    object: str = "score"


class Scores(Listed[Score], kw_only=True):
    """The response of /score."""


class Document(msgspec.Struct):
    """A text in the form of an object."""

    text: str


class RerankBody(PoolingBody, kw_only=True, forbid_unknown_fields=True):
    """The request of /rerank, as in Jina and Cohere. Returns the best ``top_n`` documents; all if omitted."""

    query: str
    documents: list[str | Document]
    top_n: int | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: int | None = None

    def texts(self) -> list[str]:
        """Return the documents.

        Raises:
            OpenAIError: 400, a field is invalid.
        """
        if not self.query:
            raise bad_field("query", "query must not be empty")
        if not 1 <= len(self.documents) <= MAX_INPUTS:
            raise bad_field("documents", f"documents must hold 1 to {MAX_INPUTS} texts, got {len(self.documents)}")
        if self.top_n is not None and self.top_n < 0:
            raise bad_field("top_n", f"top_n must be at least 0, where 0 returns all, got {self.top_n}")
        if self.max_tokens_per_doc:
            raise bad_field("max_tokens_per_doc", "max_tokens_per_doc is not supported; send shorter documents")
        texts = [document if isinstance(document, str) else document.text for document in self.documents]
        for index, text in enumerate(texts):
            if not text:
                raise bad_field(f"documents[{index}]", f"documents[{index}] must not be empty")
        return texts


class Ranked(msgspec.Struct, omit_defaults=True):
    """A document; ``index`` is its position in the request."""

    index: int
    relevance_score: float
    document: Document | None = None


class RerankUsage(msgspec.Struct):
    """Number of tokens of all texts of one response."""

    total_tokens: int


class Reranked(msgspec.Struct):
    """The response of /rerank, the best document first."""

    id: str
    model: str
    usage: RerankUsage
    results: list[Ranked]


def inputs_of(inputs: Input) -> Sequence[Prompt]:
    """Return the prompts of an ``input``.

    Raises:
        OpenAIError: 400, it is empty or too long, or its items have different types.
    """
    if not inputs:
        raise bad_field("input", "input must not be empty")
    if isinstance(inputs, str):
        return [inputs]
    if all(isinstance(item, int) for item in inputs):
        return [inputs]  # type: ignore[list-item]  # narrowed by all()
    if len(inputs) > MAX_INPUTS:
        raise bad_field("input", f"input must hold at most {MAX_INPUTS} items, got {len(inputs)}")
    for index, item in enumerate(inputs):
        if isinstance(item, int):
            raise bad_field(
                f"input[{index}]", f"input[{index}] is a token id among texts; pass only token ids or only texts"
            )
        if not item:
            raise bad_field(f"input[{index}]", f"input[{index}] must not be empty")
    return inputs  # type: ignore[return-value]  # checked above


def encode_vector(pooled: Pooled, *, is_base64: bool) -> list[float] | str:
    """Return the values of a vector, or their little-endian bytes in base64."""
    return to_base64(pooled) if is_base64 else pooled.floats().tolist()


def to_base64(pooled: Pooled) -> str:
    """Return the little-endian bytes of the values in base64."""
    return base64.b64encode(pooled.data).decode()


def _side(body: ScoreBody, *names: str) -> str | list[str]:
    values = [(name, value) for name in names if (value := getattr(body, name)) is not None]
    if len(values) != 1:
        raise bad_field(names[0], f"exactly one of {' and '.join(names)} must be given")
    name, texts = values[0]
    if isinstance(texts, list) and not 1 <= len(texts) <= MAX_INPUTS:
        raise bad_field(name, f"{name} must hold 1 to {MAX_INPUTS} texts, got {len(texts)}")
    for index, text in enumerate(texts if isinstance(texts, list) else [texts]):
        if not text:
            field = f"{name}[{index}]" if isinstance(texts, list) else name
            raise bad_field(field, f"{field} must not be empty")
    return texts


class PoolBody(PoolingBody, kw_only=True, forbid_unknown_fields=True):
    """The request of /pooling: any task; the model's default task if omitted.

    With ``data`` instead of ``input``, an I/O processor creates the prompts and the response. ``task`` may then be
    "plugin", as in vLLM, which is the same as omitting it.
    """

    input: Input | None = None
    task: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    data: Any = msgspec.UNSET
    io_processor: str | None = None

    def data_prompt(self) -> DataPrompt | None:
        """Return the data; None for a body with ``input``.

        Raises:
            OpenAIError: 400, it has neither or both, or a field that belongs to the other one.
        """
        has_data = self.data is not msgspec.UNSET
        if has_data == (self.input is not None):
            raise bad_field("input", "exactly one of input and data must be given")
        if not has_data and self.io_processor is not None:
            raise bad_field("io_processor", "io_processor needs data; pass what it reads as data, not as input")
        if has_data and self.encoding_format is not None:
            raise bad_field("encoding_format", "encoding_format must be left out with data: the I/O processor answers")
        return DataPrompt(self.data, self.io_processor) if has_data else None

    @property
    def model_task(self) -> str | None:
        """The task requested from the model."""
        return None if self.task == "plugin" and self.input is None else self.task


class PoolingData(msgspec.Struct):
    """A result: a vector, one vector per token, or the bytes of either in base64."""

    index: int
    data: list[float | list[float]] | str
    object: str = "pooling"


class PoolingResponse(Listed[PoolingData], kw_only=True):
    """The response of /pooling."""


class ProcessedResponse(msgspec.Struct, kw_only=True):
    """The response of /pooling to ``data``, as in vLLM; ``data`` is the I/O processor's answer."""

    request_id: str
    created_at: int
    data: Any
    model: str
    usage: PoolingUsage


class EmbeddingsBody(PoolingBody, kw_only=True, forbid_unknown_fields=True):
    """The request: a text, token ids, or a list of either."""

    input: Input
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None


class Embedding(msgspec.Struct):
    """A vector: numbers, or their little-endian ``float32`` bytes in base64."""

    index: int
    embedding: list[float] | str
    object: str = "embedding"


class Embeddings(Listed[Embedding], kw_only=True):
    """The response."""


class PreparedEmbeddings(PreparedPooling, kw_only=True, frozen=True):
    """A checked body. ``is_base64``: vectors are returned in base64."""

    is_base64: bool

    def answer(self, *outputs: RequestOutput | PoolingRequestOutput, response_id: str | None = None) -> Embeddings:
        """Return the body of the response; see ``PreparedBody.answer``."""
        response_id = outputs[0].request_id if response_id is None else response_id
        vectors = [encode_vector(_pooled_of(output).pooled, is_base64=self.is_base64) for output in outputs]
        return Embeddings(
            id=response_id,
            created=created_at(response_id),
            model=self.model or outputs[0].model,
            data=[Embedding(index, vector) for index, vector in enumerate(vectors)],
            usage=PoolingUsage.sum_of(outputs),
        )


def prepare_embeddings(body: EmbeddingsBody) -> PreparedEmbeddings:
    """Translate the body to requests.

    Raises:
        OpenAIError: 400, a field is invalid; it is named.
        ValidationError: a value is out of range; the message names the field.
    """
    prepared = body.prepared(ID_PREFIX, body.input, body.pooling_params("embed", dimensions=body.dimensions))
    fields = {name: getattr(prepared, name) for name in prepared.__struct_fields__}
    return PreparedEmbeddings(**fields, is_base64=body.encoding_format == "base64")


def _pooled_of(output: RequestOutput | PoolingRequestOutput) -> PoolingOutput:
    """Return the result of one prompt.

    Raises:
        OpenAIError: it has no result, because it was cancelled or expired.
    """
    if output.pooled is None and isinstance(output, RequestOutput):
        finish_reason_of(output.outputs[0].finish_reason, has_output=False)
    if output.pooled is None:
        raise ClientClosedError(f"request {output.request_id} ended without a result")
    return output.pooled
