"""Kernels that are chosen at load give the logits of the layers' own operations, and are used for few rows."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import structlog
import torch
from torch import Tensor

from penstock.kernels.normed_linear import normed_linear
from penstock.kernels.paged_attention import library
from penstock.worker.models.checks.chosen import (
    GraphClock,
    choose_by_times,
    choose_entries,
    choose_kernels,
    choose_prompt_attention,
)
from penstock.worker.models.forward import ForwardSettings
from penstock.worker.models.lean.forward import LeanForward

from ...kernels.flash_attention import StandIns
from .graphs.harness import SHORT, assert_equal, lean_forward, steps
from .lean_models import SETTINGS, make_model, make_step

pytestmark = [
    pytest.mark.usefixtures("interpreted_kernels"),
    # The interpreter's numpy warns of divisions by infinity, which the kernel intends for closed gates.
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),
]

CPU = torch.device("cpu")


class Product:
    """The kernel in Triton, which counts the rows of its calls."""

    def __init__(self) -> None:
        self.num_rows: list[int] = []

    def __call__(self, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
        self.num_rows.append(len(arguments[0]))
        return normed_linear(*arguments, **options, backend="triton")


def clock_of(*times: float) -> Callable[[Callable[[], object]], float]:
    """Return a clock with these times, in the order in which calls are timed, and 1 from then on."""
    following: Iterator[float] = iter(times)
    return lambda call: next(following, 1.0)


def choose(forward: LeanForward, times: tuple[float, ...], product: Any) -> list[dict[str, Any]]:
    with structlog.testing.capture_logs() as events:
        choose_entries(forward.network, clock_of(*times), product)
    return [dict(event) for event in events if event["event"] == "kernels_chosen"]


def logits_of(forward: LeanForward) -> list[Tensor]:
    forward.allocate(60, 4, 3, CPU)
    return [forward.run(step) for step in steps(CPU, SHORT)]


# Separate and fused, for each number of rows and each part.
FASTER = (2.0, 1.0) * 6


# A norm's weight plus one and a gate of GELU; biases; a scale of what is added.
@pytest.mark.parametrize("variant", ["gemma", "qwen2", "granite"])
@torch.inference_mode()
def test_logits_are_those_of_separate_operations(variant: str) -> None:
    plain, forward = (lean_forward(variant, CPU, num_hidden_layers=2) for _ in range(2))
    product = Product()
    heads, gates = choose(forward, FASTER, product)
    assert [(event["part"], event["fused_rows"], event["refused"]) for event in (heads, gates)] == [
        ("enter", 16, ""),
        ("feed", 16, ""),
    ]
    product.num_rows.clear()
    assert_equal(logits_of(forward), logits_of(plain))
    assert product.num_rows


@torch.inference_mode()
def test_it_serves_up_to_the_rows_to_which_it_is_faster() -> None:
    forward, product = lean_forward("llama", CPU, num_hidden_layers=1), Product()
    # Of one row and of four faster, of 16 slower; the gate is slower for one row, so for more it is not asked.
    heads, gates = choose(forward, (2, 1, 2, 1, 1, 2, 1, 2, 2, 1, 2, 1), product)
    assert (heads["fused_rows"], gates["fused_rows"]) == (4, 0)
    assert heads["us"] == {
        1: {"separate": 2, "fused": 1},
        4: {"separate": 2, "fused": 1},
        16: {"separate": 1, "fused": 2},
    }
    product.num_rows.clear()
    layer: Any = forward.network.layers[0]
    for num_rows in (4, 5):
        layer.enter(torch.ones(num_rows, 96), torch.ones(num_rows, 96))
        layer.feed(torch.ones(num_rows, 96), torch.ones(num_rows, 96))
    assert product.num_rows == [4]


@torch.inference_mode()
def test_a_wrong_or_missing_kernel_is_not_used() -> None:
    forward = lean_forward("llama", CPU, num_hidden_layers=1)

    def wrong(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
        rows, sums = normed_linear(*arguments, **options)
        return rows * 1.1, sums

    def missing(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
        raise ImportError("no Triton")

    for product, reason in ((wrong, "its results differ by 0.1"), (missing, "ImportError: no Triton")):
        assert [(event["fused_rows"], event["refused"]) for event in choose(forward, FASTER, product)] == [
            (0, reason)
        ] * 2
    layer: Any = forward.network.layers[0]
    assert (layer.enter, layer.feed) == (layer.add_and_project, layer.add_and_feed)


@pytest.mark.parametrize("variant", ["cohere", "olmo", "starcoder2"])
def test_layers_of_another_form_stay_as_they_are(variant: str) -> None:
    """Both parts read one input; a norm without weight that is centred; one with a bias."""
    assert choose(lean_forward(variant, CPU), FASTER, Product()) == []


@torch.inference_mode()
def test_prompts_attend_by_the_fastest_library_that_is_right_and_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN is not there on a CPU."""
    forward, plain = (lean_forward("llama", CPU, max_model_len=600, num_hidden_layers=2) for _ in range(2))
    with structlog.testing.capture_logs() as events:
        choose_prompt_attention(forward, clock_of(2.0, 1.0), 16, ["flash", "cuDNN"], num_tokens=513)
    (event,) = events
    assert (event["library"], event["layers"], event["us"]) == ("flash", 2, {"separate": 2, "flash": 1})
    assert event["refused"].startswith("cuDNN: RuntimeError")
    attended: list[list[int]] = []
    flash: Any = library.LIBRARIES["flash"]
    attend = flash.attend
    monkeypatch.setattr(flash, "attend", lambda *inputs: (attended.append(inputs[3].query_lens), attend(*inputs))[1])
    generator = torch.Generator().manual_seed(2)
    token_ids, blocks = torch.randint(0, 97, (3, 600), generator=generator), torch.randperm(114, generator=generator)
    results: list[list[Tensor]] = []
    for each in (forward, plain):
        each.allocate(114, 16, 3, CPU)
        computed = [0, 0, 0]
        # One prompt, two, and later parts of these, which see what is cached.
        works = (((0, 600),), ((1, 560), (2, 530)), ((1, 20), (2, 20)))
        prompts = [make_step(work, computed, token_ids, blocks.view(3, 38), 16) for work in works]
        results.append([each.run(step) for step in prompts])
    assert_equal(*results)
    assert attended == [[600]] * 2 + [[560, 530]] * 2


@pytest.mark.parametrize("is_old", [False, True])
@torch.inference_mode()
def test_windows_and_caps_are_served_by_flash_attention(is_old: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old alignment of the mask is right for whole prompts alone, so a package that has it is refused."""
    stand_ins: Any = StandIns(is_old=is_old)
    names = ["FlashAttention 2", "FlashAttention 3"]
    for name in names:
        monkeypatch.setitem(sys.modules, library.LIBRARIES[name].package, stand_ins)
    monkeypatch.setattr(library, "MIN_PROMPT_LEN", 8)
    forward = LeanForward(make_model("gemma2", torch.bfloat16, num_hidden_layers=2), ForwardSettings(64))
    with structlog.testing.capture_logs() as events:
        clock = clock_of(*(2.0, 1.0) * 2) if is_old else clock_of(*(4.0, 2.0, 1.0) * 2)
        choose_prompt_attention(forward, clock, 256, ["flash", *names], num_tokens=39)
    assert [event["window"] for event in events] == [5, None]
    assert {event["library"] for event in events} == {None if is_old else "FlashAttention 3"}
    assert events[0]["refused"].startswith("flash: KernelInputError: no window of 5 or no cap of 3.0")
    assert [event["refused"].count("its results differ by") for event in events] == [2 * is_old] * 2
    stand_ins.num_calls = 0
    tokens, blocks = torch.arange(60)[None] % 97, torch.arange(4)[None]
    forward.allocate(4, 16, 1, CPU)
    computed = [0]
    for num_new in (20, 12, 7):  # the last is too short
        forward.run(make_step([(0, num_new)], computed, tokens, blocks, 16))
    assert stand_ins.num_calls == (0 if is_old else 4)


def test_deterministic_engines_and_cpus_choose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.worker.models.checks.chosen.choose_entries", lambda *_: pytest.fail("chose"))
    module = make_model("llama", torch.float32)
    for settings in (SETTINGS, ForwardSettings(64, is_batch_invariant=True)):
        for is_fixed in (False, True):
            choose_kernels(LeanForward(module, settings), 16, is_fixed=is_fixed, has_adapters=False)


@torch.inference_mode()
def test_ranks_and_layers_with_adapters_choose_attention_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for groups, has_adapters in ((None, True), (object(), False)):
        monkeypatch.setattr(LeanForward, "groups", groups)
        with structlog.testing.capture_logs() as events:
            forward = lean_forward("llama", CPU, max_model_len=2100, num_hidden_layers=1)
            choose_by_times(forward, 16, clock_of(2.0, 1.0), has_adapters=has_adapters)
        assert [(event["part"], event["library"]) for event in events] == [("prompts", "flash")]


@pytest.mark.gpu
@torch.inference_mode()
def test_a_gpu_chooses_by_its_own_clock() -> None:
    device = torch.device("cuda")
    forward, plain = (lean_forward("qwen2", device) for _ in range(2))
    with structlog.testing.capture_logs() as events:
        choose_entries(forward.network, GraphClock(device))
    assert [event["refused"] for event in events if event["event"] == "kernels_chosen"] == ["", ""]
    for each in (forward, plain):
        each.allocate(60, 4, 3, device)
    assert_equal(*([each.run(step) for step in steps(device, SHORT)] for each in (forward, plain)))


@pytest.mark.gpu
def test_a_gpu_times_what_is_installed() -> None:
    device = torch.device("cuda")
    model = make_model("qwen3", torch.bfloat16, head_dim=64)
    torch.nn.Module.to(model, device)
    forward = LeanForward(model, ForwardSettings(64))
    with structlog.testing.capture_logs() as events:
        choose_by_times(forward, 16, GraphClock(device), has_adapters=True)
    (event,) = events
    names = {part.split(":")[0] for part in event["refused"].split("; ") if part}
    assert {*event["us"], *names} == {"separate", *library.installed()}
    assert {"separate", "flash"} <= event["us"].keys()
