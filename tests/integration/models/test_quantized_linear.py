"""Linear layers in bytes, as a GPU has them: by the Triton kernels, on a CPU by their interpreter."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from penstock.kernels import quantized_linear
from penstock.worker.models.checks.conformance import QUANTIZED_TOLERANCE, ReferenceRun, check_conformance
from penstock.worker.models.lean.forward import LeanForward
from penstock.worker.models.placing.quantized_linear import QuantizedLinear, quantize_linear_layers
from penstock.worker.models.weights.movable import ModelWeights

from ...conftest import DEMO_MODEL
from .lean_models import SETTINGS

pytestmark = pytest.mark.usefixtures("interpreted_kernels")

NUM_LAYERS = 1


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("Triton compiles for the GPU here")
    return torch.device(request.param)


def use_triton(patch: pytest.MonkeyPatch) -> None:
    """From now on, on a CPU too; weights are made bytes before, as that is thousands of rows for the interpreter."""
    from penstock.kernels.quantized_linear import gpu

    patch.setitem(quantized_linear._QUANTIZE, "cpu", gpu.quantize_rows)
    patch.setitem(quantized_linear._MULTIPLY, "cpu", gpu.multiply)


def demo_module(device: torch.device) -> PreTrainedModel:
    """Its first layers: the interpreter is slow."""
    module = transformers.AutoModelForCausalLM.from_pretrained(
        DEMO_MODEL, attn_implementation="eager", dtype=torch.float32, num_hidden_layers=NUM_LAYERS
    )
    torch.nn.Module.to(module, device)
    return module.eval()


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
@torch.inference_mode()
def test_the_demo_model_computes_about_the_same(
    quantization: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = demo_module(device)
    truth = ReferenceRun.of(module, module.config.vocab_size)
    forward = LeanForward(module, SETTINGS)
    num_linear = sum(type(part) is torch.nn.Linear for part in forward.network.modules())
    assert quantize_linear_layers(forward.network, quantization) == num_linear == 4 * NUM_LAYERS + 1
    use_triton(monkeypatch)
    assert 0 < check_conformance(forward, truth, QUANTIZED_TOLERANCE) < 0.1


@torch.inference_mode()
def test_bytes_sleep_and_wake_up_as_weights_do(device: torch.device) -> None:
    def load() -> torch.nn.Module:
        network = LeanForward(demo_module(device), SETTINGS).network
        quantize_linear_layers(network, "int8")
        return network

    network = load()
    weights = ModelWeights(network, load)
    layer = network.get_submodule("layers.0.o_proj")
    assert isinstance(layer, QuantizedLinear)
    inputs = torch.randn(3, 5, layer.weight.shape[1], device=device)
    expected = layer(inputs)
    torch.testing.assert_close(expected, inputs @ layer.weight.T, rtol=0.05, atol=0.05)
    for level in (1, 2):
        weights.release(level)
        assert level == 1 or all(parameter.is_meta for parameter in layer.parameters())
        weights.restore()
        assert torch.equal(layer(inputs), expected)


def test_narrow_gates_are_not_quantized() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Linear(64, 4, bias=False))
    assert quantize_linear_layers(model, "int8") == 1
    assert type(model[1]) is torch.nn.Linear
