"""Products of bfloat16 in float32, where the processor multiplies only that fast."""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from penstock.worker.models.checks.conformance import ReferenceRun
from penstock.worker.models.checks.wide_products import wide_products

SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 64,
}


class Recorder(TorchDispatchMode):
    """Notes the dtypes of the matrices that torch multiplies."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(name in str(func) for name in ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "scaled_dot")):
            self.dtypes |= {each.dtype for each in args if isinstance(each, Tensor)}
        return func(*args, **(kwargs or {}))


@pytest.fixture
def limit_to(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    return lambda name: monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: name)


@pytest.mark.parametrize(("capability", "dtype"), [("AVX2", torch.float32), ("AVX512", torch.bfloat16)])
def test_products_are_in_the_faster_dtype(limit_to: Callable[[str], None], capability: str, dtype: torch.dtype) -> None:
    limit_to(capability)
    inputs, weight, bias = (torch.randn(size).bfloat16() for size in ((6, 32), (16, 32), (16,)))
    heads = torch.randn(1, 2, 6, 16).bfloat16()
    with torch.inference_mode(), Recorder() as recorder, wide_products():
        outputs = [F.linear(inputs, weight, bias=bias), inputs @ weight.T, torch.matmul(heads, heads.mT)]
        outputs.append(F.scaled_dot_product_attention(heads, heads, value=heads, is_causal=True))
    assert recorder.dtypes == {dtype}
    assert {each.dtype for each in outputs} == {torch.bfloat16}
    torch.testing.assert_close(outputs[0], F.linear(inputs.float(), weight.float(), bias.float()).bfloat16())


def test_other_dtypes_stay(limit_to: Callable[[str], None]) -> None:
    limit_to("AVX2")
    with torch.inference_mode(), wide_products():
        assert F.linear(torch.ones(1, 4), torch.ones(2, 4)).dtype == torch.float32
        assert F.linear(torch.ones(1, 4).half(), torch.ones(2, 4).half()).dtype == torch.float16


def test_the_results_of_a_model_at_load_are_computed_so(limit_to: Callable[[str], None]) -> None:
    limit_to("AVX2")
    torch.manual_seed(0)
    module: Any = LlamaForCausalLM(LlamaConfig(**SHAPE)).bfloat16().eval()
    with torch.inference_mode(), Recorder() as recorder:
        reference = ReferenceRun.of(module, 64)
    assert recorder.dtypes == {torch.float32}
    with torch.inference_mode():
        expected = [module(input_ids=each[None], use_cache=False).logits[0].float() for each in reference.sequences]
    for actual, narrow in zip(reference.logits, expected, strict=True):
        torch.testing.assert_close(actual, narrow, rtol=0.05, atol=0.02)
