"""Options for the model of an engine, its low-rank adapters, and the engine that computes it."""

from __future__ import annotations

from typing import Annotated

from ...shared.errors import ConfigurationError
from ...shared.params.lora import LoraSetup
from ..options.numbers import Integer
from ..options.option import Option, OptionGroup
from ..options.readers import Choice, Folder, Model, Reader, Switch

MODEL = "model"
# The program of an engine's core, by its name in `--engine`.
CORE_MODULES = {
    "penstock": "penstock.worker.engine",
    "vllm": "penstock.worker.other_engines.vllm",
    "http": "penstock.worker.other_engines.http",
}
ADAPTERS = "low-rank adapters"


class ModelOptions(OptionGroup):
    """Options for the model, its name, and the engine that loads and computes it."""

    model: Annotated[
        str,
        Option(
            "model folder, .gguf file, name on the hub, or smollm2 (93 MB, to try)",
            Model(),
            group=MODEL,
        ),
    ]
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


class AdapterOptions(OptionGroup):
    """Options for low-rank adapters: whether they are served, their number and sizes."""

    enable_lora: Annotated[
        bool, Option("serve requests that name a low-rank adapter (LoRA) of the model", Switch(), group=ADAPTERS)
    ] = False
    max_loras: Annotated[int, Option("maximum different adapters in one batch", Integer(1, 1024), group=ADAPTERS)] = 8
    max_lora_rank: Annotated[
        int,
        Option("largest rank of an adapter; on a GPU each slot takes memory for it", Integer(1, 4096), group=ADAPTERS),
    ] = 64
    max_cpu_loras: Annotated[
        int,
        Option(
            "maximum adapters in host memory; at least as many as in one batch",
            Integer(1, 65_536),
            group=ADAPTERS,
        ),
    ] = 32
    lora_folder: Annotated[
        str,
        Option(
            "folder of adapters, each in a subfolder named by its digest; a request may also name an absolute path",
            Folder(),
            group=ADAPTERS,
        ),
    ] = ""

    @property
    def lora_setup(self) -> LoraSetup | None:
        """Limits of adapters; None if adapters are not served."""
        if not self.enable_lora:
            return None
        return LoraSetup(max_loras=self.max_loras, max_lora_rank=self.max_lora_rank, max_cpu_loras=self.max_cpu_loras)


def check_adapters(options: AdapterOptions, engine: str) -> None:
    """Raise ``ConfigurationError`` if adapters are enabled but cannot be served."""
    if not options.enable_lora:
        return
    if engine == "http":
        raise ConfigurationError("enable_lora is for engines 'penstock' and 'vllm'; engine 'http' serves no adapters")
    if options.max_cpu_loras < options.max_loras:
        raise ConfigurationError(
            f"max_cpu_loras ({options.max_cpu_loras}) must be at least max_loras ({options.max_loras}): adapters of a "
            f"batch are in the host's memory too"
        )
