"""``penstock generate``: single generations from the shell."""

from __future__ import annotations

import argparse
import asyncio
import sys

from ....producer import Client, FinishReason, SamplingParams
from ....producer.inputs.prompt import Prompt
from ....shared.process.command_line import Command, add_redis_arguments
from ....shared.redis_access.embedded import resolve_redis_url
from ..command_parts import add_sampling_arguments, sampling_params
from ..waiting_notice import WaitingNotice


def _add_generate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompts", nargs="+", metavar="PROMPT", help="text to continue; - reads standard input")
    parser.add_argument("--model", help="may be left out if only one is known, or served")
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N", help="most output tokens (128)")
    add_sampling_arguments(parser)
    parser.add_argument(
        "--chat", action="store_true", help="send each PROMPT as a user's message; needs a chat template"
    )
    parser.add_argument("--stream", action="store_true", help="print as it is generated")
    add_redis_arguments(parser)


def _run_generate(arguments: argparse.Namespace) -> int:
    params = sampling_params(arguments)
    texts = [sys.stdin.read() if prompt == "-" else prompt for prompt in arguments.prompts]
    prompts: list[Prompt] = [[{"role": "user", "content": text}] for text in texts] if arguments.chat else [*texts]
    with resolve_redis_url(arguments.redis_url) as url:
        return asyncio.run(_generate(url, arguments, prompts, params))


async def _generate(url: str, arguments: argparse.Namespace, prompts: list[Prompt], params: SamplingParams) -> int:
    """Print the answers in the order of the prompts. Return 1 if a generation did not end regularly."""
    deployment = {"namespace": arguments.namespace, "shards": arguments.shards}
    async with Client.connect(url, model=arguments.model, **deployment) as client:
        notice = WaitingNotice(client, arguments.model)
        async with notice.watching():
            if arguments.stream:
                reasons = [await _print_stream(client, prompt, params, notice) for prompt in prompts]
            else:
                answers = await asyncio.gather(*(_print_answer(client, prompt, params, notice) for prompt in prompts))
                reasons = [_print(*answer) for answer in answers]
    irregular = [reason for reason in reasons if reason not in (FinishReason.STOP, FinishReason.LENGTH)]
    for reason in irregular:
        print(f"a generation ended early: {reason}", file=sys.stderr)
    return 1 if irregular else 0


async def _print_stream(
    client: Client, prompt: Prompt, params: SamplingParams, notice: WaitingNotice
) -> FinishReason | None:
    reason = None
    async for delta in client.stream(prompt, params):
        notice.heard()
        print(delta.text, end="", flush=True)
        reason = delta.finish_reason
    print()
    return reason


async def _print_answer(
    client: Client, prompt: Prompt, params: SamplingParams, notice: WaitingNotice
) -> tuple[str, FinishReason | None]:
    texts, reason = [], None
    async for delta in client.stream(prompt, params):
        notice.heard()
        texts.append(delta.text)
        reason = delta.finish_reason
    return "".join(texts), reason


def _print(text: str, reason: FinishReason | None) -> FinishReason | None:
    print(text)
    return reason


COMMAND = Command("generate", "Generate text and print it.", run=_run_generate, add_arguments=_add_generate_arguments)
