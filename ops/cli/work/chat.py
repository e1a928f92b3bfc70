"""``penstock chat`` and ``penstock run``: a conversation in the terminal, over the queue like every client.

``run`` starts a private Redis and a worker for it, for the first minutes with a model.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field

from msgspec.structs import replace

from ....producer import LLM, Delta, FinishReason, ModelCard, SamplingParams
from ....shared.errors import PenstockError, ValidationError
from ....shared.process.command_line import Command, add_redis_arguments
from ....shared.shards import ShardsArgument
from ....shared.values.names import DEFAULT_NAMESPACE
from ..command_parts import add_sampling_arguments, need_libraries, sampling_params
from ..waiting_notice import WaitingNotice

PROMPT = ">>> "
_HELP = """\
/system TEXT   start over with TEXT as the system message; without TEXT, show it
/reset         forget the conversation, keep the system message
/help          show this list
/quit          leave, as Ctrl-D does
Ctrl-C stops an answer; what was written of it stays in the conversation."""
# What answers are drawn with if the model's authors recommend it.
_RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
# Used without a recommendation. At the queue's default of 1.0, small models write nonsense.
_TEMPERATURE = 0.7
# Ends that the user sees anyway.
_REGULAR_ENDS = (FinishReason.STOP, None)


@dataclass
class Conversation:
    """The messages so far, of which the system message comes first, and how to sample answers."""

    params: SamplingParams
    system: str = ""
    turns: list[dict[str, str]] = field(default_factory=list)

    @property
    def messages(self) -> list[dict[str, str]]:
        """Return the messages of the next request."""
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.turns]

    def add(self, role: str, text: str) -> None:
        """Append a message."""
        self.turns.append({"role": role, "content": text})


class Chat:
    """A conversation with one model on standard input and output.

    Args:
        llm: the connection.
        model: name of the model; its card must be known.
    """

    def __init__(self, llm: LLM, model: str, conversation: Conversation) -> None:
        self._llm = llm
        self._model = model
        self._conversation = conversation
        self._commands: dict[str, Callable[[str], None]] = {
            "/system": self._set_system,
            "/reset": self._reset,
            "/help": lambda _: print(_HELP),
        }

    def run(self) -> int:
        """Answer line after line until the end of the input. Return the exit status."""
        is_terminal = sys.stdin.isatty()
        if is_terminal:
            with suppress(ImportError):
                # Importing it gives input() line editing and the history of this chat.
                import readline  # noqa: F401
            print(f"chatting with {self._model}; /help lists the commands, Ctrl-D leaves")
        while True:
            try:
                line = input(PROMPT if is_terminal else "").strip()
            except EOFError:
                if is_terminal:
                    print()
                return 0
            except KeyboardInterrupt:
                print("\nCtrl-D or /quit leaves")
                continue
            name, _, rest = line.partition(" ")
            if name in ("/quit", "/exit"):
                return 0
            if name in self._commands:
                self._commands[name](rest.strip())
            elif name.startswith("/"):
                print(f"unknown command {name}; /help lists the commands")
            elif line:
                self._print_answer(line)

    def _set_system(self, text: str) -> None:
        if not text:
            print(self._conversation.system or "no system message")
            return
        self._conversation.system = text
        self._conversation.turns.clear()

    def _reset(self, _: str) -> None:
        self._conversation.turns.clear()

    def _print_answer(self, line: str) -> None:
        """Send the conversation with ``line`` as its last message, and print the answer as it arrives."""
        conversation = self._conversation
        conversation.add("user", line)
        text, reason = "", None
        try:
            for delta in self._llm.iterate(self._deltas()):
                # Before it is printed: a user stops an answer at what the screen shows.
                text += delta.text
                print(delta.text, end="", flush=True)
                reason = delta.finish_reason
            print()
            if reason is FinishReason.LENGTH:
                print("(cut off: --max-tokens or the model's length is reached)")
            elif reason not in _REGULAR_ENDS:
                print(f"(ended early: {reason})")
        except KeyboardInterrupt:
            print("\n(stopped)")
        except PenstockError as error:
            print(f"{error}; /reset starts over" if isinstance(error, ValidationError) else error, file=sys.stderr)
        if text:
            conversation.add("assistant", text)
        else:
            conversation.turns.pop()

    async def _deltas(self) -> AsyncGenerator[Delta]:
        notice = WaitingNotice(self._llm.client, self._model)
        stream = self._llm.client.stream(self._conversation.messages, self._conversation.params, model=self._model)
        async with notice.watching(), aclosing(stream):
            async for delta in stream:
                notice.heard()
                yield delta


def chat_on(
    url: str | None, arguments: argparse.Namespace, *, namespace: str = DEFAULT_NAMESPACE, shards: ShardsArgument = None
) -> int:
    """Chat with the model that the arguments name on the deployment at ``url``, and return the exit status.

    Raises:
        ValidationError: a parameter is wrong, or the model has no chat template.
        UnknownModelError: no worker has ever served the model, or any model.
    """
    params = sampling_params(arguments)
    with LLM(url, model=arguments.model, namespace=namespace, shards=shards) as llm:
        card = llm.get_model_config()
        if not card.has_chat_template:
            raise ValidationError(
                f"model {card.model!r} has no chat template, so it cannot chat; `penstock generate` continues text"
            )
        if arguments.temperature is None:
            params = _as_recommended(params, card)
        return Chat(llm, card.model, Conversation(params, arguments.system)).run()


def _as_recommended(params: SamplingParams, card: ModelCard) -> SamplingParams:
    """Return the parameters with those that the model's authors recommend."""
    recommended = {name: card.generation_config[name] for name in _RECOMMENDED if name in card.generation_config}
    return replace(params, **{"temperature": _TEMPERATURE, **recommended})


def add_chat_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that say how the model answers."""
    parser.add_argument("--system", default="", metavar="TEXT", help="system message")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="most tokens per answer (up to the model's length)")
    add_sampling_arguments(parser, f"as the model's authors recommend, or {_TEMPERATURE}")


def _add_chat_command_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="may be left out if only one is known, or served")
    add_chat_arguments(parser)
    add_redis_arguments(parser)


def _run_chat(arguments: argparse.Namespace) -> int:
    return chat_on(arguments.redis_url, arguments, namespace=arguments.namespace, shards=arguments.shards)


CHAT = Command("chat", "Chat with a model in this terminal.", run=_run_chat, add_arguments=_add_chat_command_arguments)


def _add_run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="MODEL", help="GGUF file, folder, hub name, or smollm2 (93 MB, to try)")
    add_chat_arguments(parser)
    parser.add_argument(
        "--worker-options",
        default="",
        metavar="WORDS",
        help="options of `worker start`, as one argument: '--quantization int8 --max-model-len 4096'",
    )
    parser.set_defaults(model=None)


def _run_model(arguments: argparse.Namespace) -> int:
    need_libraries("penstock run", "psutil", "torch", "transformers", extra="all")
    # Only this command needs psutil.
    from ...local.load_progress import LoadProgress
    from ...local.stack import LocalStack

    notice = "The first start on a machine compiles kernels and takes longer."
    print(f"loading {arguments.path} …\n{notice}", file=sys.stderr, flush=True)
    options = shlex.split(arguments.worker_options)
    with (
        LoadProgress(sys.stderr) as progress,
        LocalStack(arguments.path, options, while_loading=progress.update) as stack,
    ):
        progress.close()
        print(f"ready in {stack.ready_time_s:.1f} s", file=sys.stderr, flush=True)
        return chat_on(stack.url, arguments)


RUN = Command(
    "run", "Load a model and chat with it: a private Redis, a worker and `chat` in one.", _run_model, _add_run_arguments
)
