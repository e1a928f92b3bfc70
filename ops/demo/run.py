"""`penstock demo`: the whole system on this machine, with checked answers.

A private Redis, `worker start` on the CPU with the demo model, and this process as the web app: it enqueues real
questions, streams the answers side by side, checks them, and stops everything it started.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ...producer import Client, SamplingParams
from ..local.stack import LocalStack
from ..statistics import StreamTimes, percentile
from .screen import Screen, make_screen
from .styles import show_styles
from .task import Question, demo_questions

MODEL = Path(__file__).parent / "model"
PASS_SHARE = 0.98


@dataclass
class Answer:
    """A question, its answer, and the times of its stream."""

    question: Question
    text: str
    times: StreamTimes

    @property
    def correct(self) -> bool:
        return self.text.strip() == self.question.answer


async def ask_all(url: str, questions: list[Question], concurrency: int, screen: Screen) -> list[Answer]:
    """Stream the answers to all questions, ``concurrency`` at a time."""
    slots = asyncio.Semaphore(concurrency)
    params = SamplingParams(temperature=0.0, max_tokens=64)

    async with Client.connect(url) as client:

        async def ask(number: int, question: Question) -> Answer:
            async with slots:
                answer = Answer(question, "", StreamTimes())
                async for delta in client.stream(question.prompt, params):
                    answer.times.saw(len(delta.token_ids))
                    answer.text += delta.text
                    if delta.text:
                        screen.token(number, question.prompt, delta.text)
                screen.end(number, question.prompt, answer.text.strip(), answer.correct)
                return answer

        return list(await asyncio.gather(*(ask(i, q) for i, q in enumerate(questions, 1))))


def run_demo(num_questions: int, concurrency: int, seed: int, dtype: str, url: str | None = None) -> int:
    """Run the demo and return the exit status: 0 if at least 98 % of the answers are right.

    ``url`` is that of a running deployment to use instead of a new one. It must serve the demo model, in any dtype.
    """
    console = Console()
    questions = demo_questions(num_questions, seed)
    with ExitStack() as stack:
        is_own = url is None
        if url is None:
            console.print("starting Redis and a worker with the demo model …")
            options = ["--device", "cpu", "--dtype", dtype, "--served-model-name", "demo", "--enable-lora"]
            local = stack.enter_context(LocalStack(MODEL, options))
            console.print(f"ready in {local.ready_time_s:.1f} s; asking {num_questions} questions\n")
            url = local.url
        with make_screen(console, len(questions)) as screen:
            started = time.perf_counter()
            answers = asyncio.run(ask_all(url, questions, concurrency, screen))
            wall_s = time.perf_counter() - started
        # Adapters are registered only in the demo's own deployment.
        are_styles_right = show_styles(console, url, seed) if is_own else True
    status = _report(console, answers, wall_s, concurrency)
    if not are_styles_right:
        console.print("the adapters gave wrong answers", style="red")
        return 1
    return status


def _report(console: Console, answers: list[Answer], wall_s: float, concurrency: int) -> int:
    num_right = sum(answer.correct for answer in answers)
    num_tokens = sum(answer.times.num_tokens for answer in answers)
    ttft_ms = [answer.times.ttft_s * 1000 for answer in answers if answer.times.ttft_s is not None]
    itl_ms = [gap * 1000 for answer in answers for gap in answer.times.itl_s]
    table = Table(title=f"{len(answers)} questions, {concurrency} at once")
    for column in ("right", "TTFT p50 / p99", "ITL p50 / p99", "tokens/s"):
        table.add_column(column, justify="right")
    table.add_row(
        f"{num_right}/{len(answers)}",
        f"{percentile(ttft_ms, 0.5):.1f} / {percentile(ttft_ms, 0.99):.1f} ms",
        f"{percentile(itl_ms, 0.5):.1f} / {percentile(itl_ms, 0.99):.1f} ms",
        f"{num_tokens / wall_s:,.0f}",
    )
    console.print()
    console.print(table)
    if num_right < PASS_SHARE * len(answers):
        console.print(f"fewer than {PASS_SHARE:.0%} of the answers are right", style="red")
        return 1
    console.print("every token came through a Redis stream and back over pub/sub; everything is stopped again.")
    console.print("`make demo MODEL=smollm2` shows a pretrained model (93 MB), and kills its engine in the middle.")
    console.print("`make demo-dashboard` keeps the system busy, and shows it in a browser.")
    return 0
