"""`penstock demo --model`: a pretrained model answers three people, fills in a schema, and outlives its engine.

A private Redis and `worker start` on this machine, and this process as the web app. The text of each answer is
compared with that of a second run in which nothing is killed.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import aclosing

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from ...producer import Client, SamplingParams, StructuredOutputsParams
from ...shared.deployment.pretrained import PRETRAINED
from ..local.load_progress import LoadProgress
from ..local.stack import LocalStack

# The same tokens in any batch and after any restart, so that two runs can be compared.
_WORKER_OPTIONS = ("--served-model-name", "demo", "--deterministic", "--max-model-len", "2048")
_QUESTIONS = {
    "Ana": "Write a short story about a lighthouse keeper and a cat.",
    "Ben": "How do I make tomato soup? Give me the steps.",
    "Chiara": "Write a letter to a friend about a walk in the mountains.",
}
_CHAT = SamplingParams(temperature=0.0, max_tokens=110, min_tokens=60)
# Each person has read this many tokens when the engine is killed.
_TOKENS_BEFORE_KILL = 25
_NOTE = "Maria Silva, 34, moved from Porto to Lisbon in 2019. She plays chess and likes to sail."
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "city": {"type": "string", "maxLength": 40},
        "hobbies": {"type": "array", "items": {"type": "string", "maxLength": 20}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "city", "hobbies"],
    "additionalProperties": False,
}
_WIDTH = 80


class Panels:
    """Answers that grow side by side, in a panel per person on a terminal; elsewhere they are printed at their end."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._texts = dict.fromkeys(_QUESTIONS, "")
        self._notice = ""
        self._live = Live(self._render(), console=console, refresh_per_second=12) if console.is_terminal else None

    def __enter__(self) -> Panels:
        if self._live is not None:
            self._live.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.__exit__(None, None, None)
        else:
            self._console.print(self._render())

    def add(self, person: str, text: str) -> None:
        """Append a piece of an answer."""
        self._texts[person] += text
        self._update()

    def notice(self, words: str) -> None:
        """Show what happens to the engine."""
        self._notice = words
        if self._live is None:
            self._console.print(words, style="yellow")
        self._update()

    def _update(self) -> None:
        if self._live is not None:
            self._live.update(self._render())

    def _render(self) -> Group:
        panels = [
            Panel(Text(text.strip()), title=f"{person}: {_QUESTIONS[person]}", title_align="left", width=_WIDTH)
            for person, text in self._texts.items()
        ]
        return Group(*panels, Text(self._notice, style="yellow"))


def run_real_demo(name: str) -> int:
    """Run the demo with a model of ``PRETRAINED``. Return 0 if the texts are equal and the JSON fits its schema.

    Raises:
        ConfigurationError: the model cannot be downloaded, or the worker did not start.
    """
    model, console = PRETRAINED[name], Console()
    if not model.is_cached:
        console.print(f"downloading {model.summary}, once …")
    path = model.fetch()
    console.print("starting Redis and a worker …")
    with (
        LoadProgress(sys.stdout) as progress,
        LocalStack(path, _WORKER_OPTIONS, while_loading=progress.update) as stack,
    ):
        progress.close()
        console.print(f"{model.summary}: ready in {stack.ready_time_s:.1f} s\n")
        status = asyncio.run(_show(stack.url, console))
    console.print("\neverything is stopped again. To chat with the model yourself:")
    console.print(f"  penstock run {path}", soft_wrap=True)
    return status


async def _show(url: str, console: Console) -> int:
    async with Client.connect(url) as client:
        console.print("three people chat, and the engine is killed in the middle", style="bold")
        with Panels(console) as panels:
            texts = await _chat(client, panels)
        console.print("\nthe same questions again, and nothing is killed …")
        undisturbed = await _chat(client, None)
        num_equal = sum(texts[person] == undisturbed[person] for person in _QUESTIONS)
        is_equal = num_equal == len(_QUESTIONS)
        console.print(
            f"{num_equal} of {len(_QUESTIONS)} texts are equal to the last character",
            style="green" if is_equal else "red",
        )
        console.print("\nan answer that must fit a schema", style="bold")
        fits = await _extract(client, console)
    return 0 if is_equal and fits else 1


async def _chat(client: Client, panels: Panels | None) -> Mapping[str, str]:
    """Return the answers by person. With ``panels``, show them, and kill the engine once each person has read some."""
    texts = dict.fromkeys(_QUESTIONS, "")
    num_tokens = dict.fromkeys(_QUESTIONS, 0)
    is_under_way, is_resumed = asyncio.Event(), asyncio.Event()

    async def answer(person: str, question: str) -> None:
        messages = [{"role": "user", "content": question}]
        async with aclosing(client.stream(messages, _CHAT)) as deltas:
            async for delta in deltas:
                texts[person] += delta.text
                num_tokens[person] += len(delta.token_ids)
                if panels is not None:
                    panels.add(person, delta.text)
                if min(num_tokens.values()) >= _TOKENS_BEFORE_KILL:
                    is_under_way.set()
                is_resumed.set()

    async def disturb(panels: Panels) -> None:
        await is_under_way.wait()
        started = time.perf_counter()
        (engine,) = await client.engines()
        os.kill(engine.core_pid, signal.SIGKILL)
        panels.notice(f"kill -9 of the engine after {sum(num_tokens.values())} tokens …")
        # Heartbeats say that it is dead.
        while any(other.core_pid == engine.core_pid for other in await client.engines()):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        # What the dead engine had published has been read by now.
        is_resumed.clear()
        await is_resumed.wait()
        panels.notice(f"a new engine went on with all three texts after {time.perf_counter() - started:.1f} s")

    answers = [answer(person, question) for person, question in _QUESTIONS.items()]
    await asyncio.gather(*answers, *([disturb(panels)] if panels is not None else []))
    return texts


async def _extract(client: Client, console: Console) -> bool:
    """Print an answer under a schema, and return whether it is JSON with the properties of the schema."""
    params = SamplingParams(temperature=0.0, max_tokens=120, structured_outputs=StructuredOutputsParams(json=_SCHEMA))
    question = f"Extract the person's data as JSON with name, age, city and hobbies: {_NOTE}"
    output = await client.generate([{"role": "user", "content": question}], params)
    console.print(_NOTE, style="dim", width=_WIDTH)
    try:
        person = json.loads(output.outputs[0].text)
    except ValueError:
        console.print(f"not JSON: {output.outputs[0].text}", style="red")
        return False
    console.print(json.dumps(person, ensure_ascii=False), width=_WIDTH)
    return isinstance(person, dict) and person.keys() == _SCHEMA["properties"].keys()
