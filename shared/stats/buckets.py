"""Upper bounds of the buckets of times and lengths; larger values are counted in one more bucket.

Where vLLM has a histogram its bounds are among ours, so that boards and rules that name one find it. vLLM's begin where
its own times do; ours go on below, since a small model answers in milliseconds.

Source: vLLM 0.33, ``vllm/v1/metrics/buckets.py``.
"""

from __future__ import annotations

# Seconds. Of a whole request and of its parts.
REQUEST_TIME_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2,
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
FIRST_TOKEN_TIME_S = (
    0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
TOKEN_TIME_S = (
    0.0005, 0.001, 0.0025, 0.005,
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
# vLLM has none of these.
STEP_TIME_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
# Tokens of a request: 1, 2, 5, 10 and so on. vLLM ends at the model's length, we at a length above all models'.
REQUEST_TOKENS = tuple(
    float(digit * 10**power) for power in range(7) for digit in (1, 2, 5) if digit * 10**power <= 2e6
)
STEP_TOKENS = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)
