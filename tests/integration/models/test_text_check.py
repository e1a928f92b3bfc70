"""The check at load of what smaller number formats cost on a text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from structlog.typing import EventDict

from penstock.shared.errors import ModelLoadError
from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.engine.composition import build_engine
from penstock.worker.models.checks import kl_limits
from penstock.worker.models.checks.kl_limits import KL_LIMITS, largest_kl
from penstock.worker.models.lean.forward import LeanForward
from penstock.worker.models.loading.calibration import TextEncoder
from penstock.worker.models.loading.loader import load_module
from penstock.worker.models.loading.text_check import TextCheck, check_prompt
from penstock.worker.models.placing.packed_linear import pack_linear_layers
from penstock.worker.text.tokenizer import TextCodec

from ...conftest import DEMO_MODEL
from .lean_models import SETTINGS, make_model

pytestmark = pytest.mark.usefixtures("compiled")

FOUR_BITS = EngineConfig(model=str(DEMO_MODEL), dtype="bfloat16", quantization="int4")
# With such a vocabulary, the demo model would predict its text well.
LARGE_VOCABULARY = 10_000_000
# Each limit when it was last lowered. Never raise one.
LOWEST_LIMITS = {
    ("bfloat16", "bfloat16"): 0.0015,
    ("gguf", "bfloat16"): 0.0047,
    ("int8", "bfloat16"): 0.007,
    ("int4-mixed", "bfloat16"): 0.049,
    ("int4", "bfloat16"): 0.09,
    ("bfloat16", "int8"): 0.0018,
    ("bfloat16", "fp8_e4m3"): 0.010,
}


def demo_forward() -> LeanForward:
    return LeanForward(load_module(FOUR_BITS, DEMO_MODEL), SETTINGS)


def demo_check(forward: LeanForward) -> TextCheck:
    text = "spell 407: four hundred seven.\ncount from two to five: two three four five.\n"
    return TextCheck(forward, TextCodec.load(DEMO_MODEL).encode(text))


def compared(check: TextCheck, forward: LeanForward, vocab_size: int) -> list[EventDict]:
    with capture_logs() as lines:
        check.compare(forward, FOUR_BITS, vocab_size)
    return lines


def test_limits_only_fall() -> None:
    assert KL_LIMITS.keys() == LOWEST_LIMITS.keys()
    assert all(KL_LIMITS[name] <= limit for name, limit in LOWEST_LIMITS.items())


def test_limits_of_weights_and_cache_add_up() -> None:
    both, weights, cache = largest_kl("int4", "int8"), largest_kl("int4", None), largest_kl(None, "int8")
    assert None not in (both, weights, cache)
    plain = KL_LIMITS["bfloat16", "bfloat16"]
    ratio = (weights or 0.0) / (KL_LIMITS["int4", "bfloat16"] + plain)
    assert both == pytest.approx(ratio * (KL_LIMITS["int4", "bfloat16"] + KL_LIMITS["bfloat16", "int8"]))
    assert cache == pytest.approx(ratio * (KL_LIMITS["bfloat16", "int8"] + plain))
    assert largest_kl("fp8", None) is None


@torch.inference_mode()
def test_a_trained_model_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = demo_forward()
    check = demo_check(forward)
    (same,) = compared(check, forward, LARGE_VOCABULARY)
    assert (same["event"], same["log_level"], same["is_trained"]) == ("quantization_checked", "info", True)
    assert (same["kl"], same["top1"]) == (pytest.approx(0, abs=1e-4), 1.0)
    assert same["perplexity"] == same["perplexity_before"] > 1
    pack_linear_layers(forward.network, "int4")
    (packed,) = compared(check, forward, LARGE_VOCABULARY)
    assert 0 < packed["kl"] < 0.1
    monkeypatch.setitem(kl_limits.KL_LIMITS, ("int4", "bfloat16"), -1.0)
    _, costly = compared(check, forward, LARGE_VOCABULARY)
    assert (costly["event"], costly["log_level"]) == ("quantization_costly", "warning")
    assert (costly["kl"], costly["limit"]) == (packed["kl"], largest_kl("int4", None))


@torch.inference_mode()
def test_a_trained_model_that_predicts_another_text_is_refused() -> None:
    forward = demo_forward()
    check = demo_check(forward)
    for weight in forward.network.parameters():
        weight.data = weight.data.flip(0)
    with pytest.raises(ModelLoadError, match=r"in int4 the model predicts another text: the KL divergence .* is \d"):
        check.compare(forward, FOUR_BITS, LARGE_VOCABULARY)


@torch.inference_mode()
def test_a_random_model_is_not_judged() -> None:
    forward = LeanForward(make_model("llama", torch.bfloat16), SETTINGS)
    check = TextCheck(forward, list(range(2, 60)))
    for weight in forward.network.parameters():
        weight.data = weight.data.flip(0)
    (line,) = compared(check, forward, 97)
    assert not line["is_trained"]
    assert line["kl"] > 1


def test_only_smaller_formats_of_whole_models_are_checked() -> None:
    def prompt(**options: Any) -> list[int]:
        config = EngineConfig(model=str(DEMO_MODEL), **options)
        return check_prompt(TextEncoder(Path(DEMO_MODEL), config, 100), config, 90)

    assert len(prompt(quantization="int8")) == len(prompt(kv_cache_dtype="int8")) == 90
    assert max(prompt(quantization="int8")) < 100
    assert prompt() == prompt(quantization="int8", load_format="dummy") == []
    assert prompt(quantization="int8", tensor_parallel_size=2) == []


@pytest.mark.parametrize(
    ("options", "is_checked"), [({}, False), ({"quantization": "int4-mixed"}, True), ({"kv_cache_dtype": "fp8"}, True)]
)
@pytest.mark.usefixtures("own_cache")  # a stored model is not checked again
def test_an_engine_reports_the_divergence_of_its_formats(options: dict[str, Any], is_checked: bool) -> None:
    config = EngineConfig(model=str(DEMO_MODEL), kv_cache_memory=1 << 24, **options)
    with capture_logs() as lines:
        build_engine(config, Path(DEMO_MODEL))
    assert ("quantization_checked" in {line["event"] for line in lines}) == is_checked
