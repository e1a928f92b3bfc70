"""What the bodies of models that pool have in common, and those of /classify, /pooling, /score and /rerank.

Names and forms are vLLM's, which follow Jina's and Cohere's.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any, Generic, Literal, Protocol, TypeVar

import msgspec

from ...shared.messages.outcome import Usage as TokenCounts
from ...shared.params.pooling import Pooled, PoolingParams
from ..inputs.options import RequestOptions
from ..inputs.prompt import Prompt
from .errors import bad_field
from .generation_body import plain_options
from .prepared import PreparedBody

T = TypeVar("T")
MAX_INPUTS = 2048
Input = str | list[str | int | list[int]]


class PoolingBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields that mean the same in all of them; null is the default of each.

    ``use_activation``, ``priority``, ``cache_salt`` and the truncation are vLLM's; ``prompt_name``, ``band`` and
    ``timeout_s`` are Penstock's. ``user`` says nothing to a server of one's own.
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

    def pooling_params(self, task: str | None, **of_endpoint: Any) -> PoolingParams:
        """Return what the body asks for.

        Raises:
            ValidationError: a value is out of range; the message names the field.
        """
        return PoolingParams(task=task, use_activation=self.use_activation, prompt_name=self.prompt_name, **of_endpoint)

    def prepared(self, id_prefix: str, given: Input, params: PoolingParams) -> PreparedPooling:
        """Return what is asked of the client for ``given``, the body's ``input``. Raises: as ``inputs_of``."""
        prompts = inputs_of(given)
        # The client calls a single prompt by no number; the body may hold it in a list.
        is_only_item = prompts is given and len(prompts) == 1
        return PreparedPooling(
            id_prefix=id_prefix,
            prompts=prompts,
            params=params,
            options=self.request_options(),
            fields={"prompt": "input[0]" if is_only_item else "input"},
        )

    def request_options(self) -> RequestOptions:
        """Return what the body says beside prompt and parameters."""
        return plain_options(self)


class PreparedPooling(PreparedBody, kw_only=True, frozen=True):
    """A checked body of an endpoint that pools."""

    params: PoolingParams


class _Counted(Protocol):
    @property
    def usage(self) -> TokenCounts | None: ...


class PoolingUsage(msgspec.Struct):
    """Tokens of all texts of one response."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0

    @classmethod
    def of(cls, outputs: Sequence[_Counted]) -> PoolingUsage:
        """Return the sum."""
        num_tokens = sum(output.usage.num_prompt_tokens for output in outputs if output.usage is not None)
        return cls(num_tokens, num_tokens)


class ClassifyBody(PoolingBody, kw_only=True, forbid_unknown_fields=True):
    """The request of /classify."""

    input: Input


class Listed(msgspec.Struct, Generic[T], kw_only=True):
    """A response with a result for each text or pair, in order."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[T]
    usage: PoolingUsage


class Classification(msgspec.Struct):
    """The most probable class of one text, and the numbers of all."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class Classifications(Listed[Classification], kw_only=True):
    """The response of /classify."""


class ScoreBody(PoolingBody, kw_only=True, forbid_unknown_fields=True):
    """The request of /score: one text against others, or as many as others. ``queries`` and ``documents`` are other
    names of ``text_1`` and ``text_2``."""

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None

    def pairs(self) -> tuple[str | list[str], str | list[str]]:
        """Return both sides.

        Raises:
            OpenAIError: 400, one is missing, given twice, empty or too long.
        """
        return _side(self, "text_1", "queries"), _side(self, "text_2", "documents")

    def names(self) -> dict[str, str]:
        """Return the names by which the body has given the two sides, by those of ``Client.score``."""
        return {
            "texts": "text_1" if self.queries is None else "queries",
            "others": "text_2" if self.documents is None else "documents",
        }


class Score(msgspec.Struct):
    """How well the texts of one pair go together."""

    index: int
    score: float
    object: str = "score"


class Scores(Listed[Score], kw_only=True):
    """The response of /score."""


class Document(msgspec.Struct):
    """A text, in the form in which some send it."""

    text: str


class RerankBody(PoolingBody, kw_only=True, forbid_unknown_fields=True):
    """The request of /rerank, as Jina and Cohere have it; ``top_n`` of the best are told, all if it is left out."""

    query: str
    documents: list[str | Document]
    top_n: int | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: int | None = None

    def texts(self) -> list[str]:
        """Return the documents.

        Raises:
            OpenAIError: 400, a field is wrong.
        """
        if not self.query:
            raise bad_field("query", "query must not be empty")
        if not 1 <= len(self.documents) <= MAX_INPUTS:
            raise bad_field("documents", f"documents must hold 1 to {MAX_INPUTS} texts, got {len(self.documents)}")
        if self.top_n is not None and self.top_n < 0:
            raise bad_field("top_n", f"top_n must be at least 0, where 0 tells of all, got {self.top_n}")
        if self.max_tokens_per_doc:
            raise bad_field("max_tokens_per_doc", "max_tokens_per_doc is not supported; send shorter documents")
        texts = [one if isinstance(one, str) else one.text for one in self.documents]
        for index, text in enumerate(texts):
            if not text:
                raise bad_field(f"documents[{index}]", f"documents[{index}] must not be empty")
        return texts


class Ranked(msgspec.Struct, omit_defaults=True):
    """One document; ``index`` is its place in the request."""

    index: int
    relevance_score: float
    document: Document | None = None


class RerankUsage(msgspec.Struct):
    """Tokens of all texts of one response."""

    total_tokens: int


class Reranked(msgspec.Struct):
    """The response of /rerank, the best document first."""

    id: str
    model: str
    usage: RerankUsage
    results: list[Ranked]


def inputs_of(given: Input) -> Sequence[Prompt]:
    """Return the prompts of an ``input``.

    Raises:
        OpenAIError: 400, it is empty, too long, or its items are of several kinds.
    """
    if not given:
        raise bad_field("input", "input must not be empty")
    if isinstance(given, str):
        return [given]
    if all(isinstance(item, int) for item in given):
        return [given]  # type: ignore[list-item]  # narrowed by all()
    if len(given) > MAX_INPUTS:
        raise bad_field("input", f"input must hold at most {MAX_INPUTS} items, got {len(given)}")
    for index, item in enumerate(given):
        if isinstance(item, int):
            raise bad_field(f"input[{index}]", f"input[{index}] is a token id among texts; give one or the other")
        if not item:
            raise bad_field(f"input[{index}]", f"input[{index}] must not be empty")
    return given  # type: ignore[return-value]  # as was checked


def written(pooled: Pooled, *, is_base64: bool) -> list[float] | str:
    """The numbers of a vector, or their little-endian bytes in base64."""
    return in_base64(pooled) if is_base64 else pooled.floats().tolist()


def in_base64(pooled: Pooled) -> str:
    """The little-endian bytes of its numbers."""
    return base64.b64encode(pooled.data).decode()


def _side(body: ScoreBody, *names: str) -> str | list[str]:
    given = [(name, value) for name in names if (value := getattr(body, name)) is not None]
    if len(given) != 1:
        raise bad_field(names[0], f"exactly one of {' and '.join(names)} must be given")
    name, texts = given[0]
    if isinstance(texts, list) and not 1 <= len(texts) <= MAX_INPUTS:
        raise bad_field(name, f"{name} must hold 1 to {MAX_INPUTS} texts, got {len(texts)}")
    for index, text in enumerate(texts if isinstance(texts, list) else [texts]):
        if not text:
            named = f"{name}[{index}]" if isinstance(texts, list) else name
            raise bad_field(named, f"{named} must not be empty")
    return texts
