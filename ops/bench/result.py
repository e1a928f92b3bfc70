"""What a run of the workload measured."""

from __future__ import annotations

import msgspec

from ..latency import StreamTimes, percentile


class RunResult(msgspec.Struct, kw_only=True):
    """Rates and latencies of one run; milliseconds."""

    output_tokens: int
    wall_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    output_token_ids: list[list[int]] = []

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.wall_s

    @classmethod
    def of(cls, wall_s: float, outputs: list[list[int]], times: list[StreamTimes]) -> RunResult:
        """Reduce the clocks of a run."""
        ttft = [clock.ttft_s * 1000 for clock in times if clock.ttft_s is not None]
        itl = [gap * 1000 for clock in times for gap in clock.itl_s]
        return cls(
            output_tokens=sum(map(len, outputs)),
            wall_s=wall_s,
            ttft_p50_ms=percentile(ttft, 0.5),
            ttft_p99_ms=percentile(ttft, 0.99),
            itl_p50_ms=percentile(itl, 0.5),
            itl_p99_ms=percentile(itl, 0.99),
            output_token_ids=outputs,
        )
