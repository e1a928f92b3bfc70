"""``python -m penstock.ops.lab.metrics_table`` prints the table of ops/guide/operating/metrics.md."""

from __future__ import annotations

from collections.abc import Iterator

from ...shared.metrics import ALL, MetricKind


def table() -> Iterator[str]:
    """Return its lines."""
    yield "| metric | kind | labels | what |"
    yield "|---|---|---|---|"
    for spec in ALL.values():
        name = f"penstock_{spec.name}" + ("_total" if spec.kind == MetricKind.COUNTER else "")
        vllm = " (vLLM's)" if spec.is_vllms else ""
        yield f"| `{name}`{vllm} | {spec.kind.value} | {', '.join(spec.labels)} | {spec.help} |"


if __name__ == "__main__":
    print(*table(), sep="\n")
