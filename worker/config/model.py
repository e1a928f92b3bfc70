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
        str, Option("what clients call it", Reader("NAME"), default="the last part of `model`", group=MODEL)
    ] = ""
    engine: Annotated[
        str,
        Option(
            "what computes: Penstock's own engine, vLLM's in the environment of --engine-python, or the server at "
            "--engine-url",
            Choice(*CORE_MODULES),
            group=MODEL,
        ),
    ] = "penstock"
    engine_python: Annotated[
        str,
        Option("the Python that has vLLM and penstock", Reader("FILE"), default="the one that runs this", group=MODEL),
    ] = ""
    engine_options: Annotated[
        str,
        Option(
            "options of `vllm serve` for its engine, in quotes; they win over those here",
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
            "the words that start that server, in quotes, where the worker is to start it and to end it",
            Reader("WORDS"),
            default="none",
            group=MODEL,
        ),
    ] = ""
    dtype: Annotated[
        str,
        Option(
            "what is computed in; auto: as the weights were saved",
            Choice("auto", "float32", "bfloat16", "float16"),
            group=MODEL,
        ),
    ] = "auto"
    load_format: Annotated[
        str,
        Option(
            "dummy reads no weights, but draws random ones on the device, for benchmarks; sharded_state is auto by "
            "vLLM's name for a folder that save_sharded_state wrote",
            Choice("auto", "dummy", "sharded_state"),
            group=MODEL,
        ),
    ] = "auto"
    trust_remote_code: Annotated[bool, Option("run code that comes with the model", Switch(), group=MODEL)] = False
    runner: Annotated[
        str,
        Option(
            "what the model is for: generate, or pooling (embeddings, classes, scores); auto: as its files say",
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
