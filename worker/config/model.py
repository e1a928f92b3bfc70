"""Options for the model of an engine, and for the engine that computes it."""

from __future__ import annotations

from typing import Annotated

from ..options.groups import OptionGroup
from ..options.option import Option
from ..options.readers import Choice, Model, Reader, Switch

MODEL = "model"
# The program of an engine's core, by its name in `--engine`.
CORE_MODULES = {
    "penstock": "penstock.worker.engine",
    "vllm": "penstock.worker.other_engines.vllm",
    "http": "penstock.worker.other_engines.http",
}


class ModelOptions(OptionGroup):
    """Options for the model, its name, and the engine that loads and computes it."""

    model: Annotated[str, Option("model folder, .gguf file, or name on the hub", Model(), group=MODEL)]
    served_model_name: Annotated[
        str, Option("name of the model for clients", Reader("NAME"), default="the last part of `model`", group=MODEL)
    ] = ""
    engine: Annotated[
        str,
        Option(
            "engine that computes: Penstock's, vLLM's in the environment of --engine-python, or the server at "
            "--engine-url",
            Choice(*CORE_MODULES),
            group=MODEL,
        ),
    ] = "penstock"
    engine_python: Annotated[
        str,
        Option(
            "Python interpreter of the environment with vLLM and penstock",
            Reader("FILE"),
            default="this interpreter",
            group=MODEL,
        ),
    ] = ""
    engine_options: Annotated[
        str,
        Option(
            "engine options of `vllm serve`, in quotes; they override options of this command",
            Reader("WORDS"),
            default="none",
            group=MODEL,
        ),
    ] = ""
    engine_url: Annotated[
        str,
        Option("address of a llama-server or an SGLang server", Reader("URL"), default="none", group=MODEL),
    ] = ""
    engine_command: Annotated[
        str,
        Option(
            "command line of that server, in quotes; the worker then starts and stops it",
            Reader("WORDS"),
            default="none",
            group=MODEL,
        ),
    ] = ""
    dtype: Annotated[
        str,
        Option(
            "dtype of weights and activations; auto: dtype of the saved weights",
            Choice("auto", "float32", "bfloat16", "float16"),
            group=MODEL,
        ),
    ] = "auto"
    load_format: Annotated[
        str,
        Option(
            "dummy: random weights, for benchmarks; sharded_state: same as auto, vLLM's name for a folder written"
            " by save_sharded_state",
            Choice("auto", "dummy", "sharded_state"),
            group=MODEL,
        ),
    ] = "auto"
    trust_remote_code: Annotated[bool, Option("run code that comes with the model", Switch(), group=MODEL)] = False
    runner: Annotated[
        str,
        Option(
            "task of the model: generate, or pooling (embeddings, classes, scores); auto: according to its files",
            Choice("auto", "generate", "pooling"),
            group=MODEL,
        ),
    ] = "auto"

    @property
    def model_name(self) -> str:
        """Name under which clients request the model."""
        return self.served_model_name or self.model.rstrip("/").rsplit("/", 1)[-1]

    @property
    def needs_weights(self) -> bool:
        """Whether the model's folder must contain weights, which only Penstock's engine reads."""
        return self.engine == "penstock" and self.load_format != "dummy"
