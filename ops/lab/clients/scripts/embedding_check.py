"""The check of embeddings in the tries of Python packages."""

from collections.abc import Sequence

TEXTS = ["A cat sits on the mat.", "Shares fell by two percent."]


def check_embeddings(query: Sequence[float], documents: Sequence[Sequence[float]]) -> None:
    """Check the embeddings of ``TEXTS``, and that of the first text as a query. All have the length 1."""
    same, other = (sum(a * b for a, b in zip(query, vector, strict=True)) for vector in documents)
    assert other < 0.99 < same < 1.01, (same, other)
