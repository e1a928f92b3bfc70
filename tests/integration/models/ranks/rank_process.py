"""``python -m tests.integration.models.ranks.rank_process RANK WORLD MEETING ANSWERS_FD``: one rank of a test.

Jobs come as lines of JSON on the standard input, the same to every rank, and each is answered by a line.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import structlog
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from penstock.kernels import native
from penstock.ops.lab.survey import trial
from penstock.shared.errors import ConfigurationError
from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.engine.setup.host import load_native_kernels
from penstock.worker.models.adapters.attach import attach_adapters
from penstock.worker.models.adapters.peft_folder import LayerMatrices
from penstock.worker.models.adapters.slots import AdapterSlots
from penstock.worker.models.forward import Forward, ForwardSettings, ModelInput
from penstock.worker.models.lean.native import make_native
from penstock.worker.models.lean.reading.decoder import read_decoder
from penstock.worker.models.lean.staged import StagedForward, lean_forward
from penstock.worker.models.loaded import LoadedModel
from penstock.worker.models.loading import loader
from penstock.worker.models.loading.candidates import choose_forward, run_reference
from penstock.worker.models.loading.fixed_shapes import is_invariant_in_any_size
from penstock.worker.models.loading.loader import load_model, load_weights
from penstock.worker.models.loading.reading import ReadModel, read_model
from penstock.worker.models.modes.packed import PackedForward
from penstock.worker.models.parallel.cut import check_layout, cut_decoder, plan_of_part
from penstock.worker.models.parallel.groups import RankGroups
from penstock.worker.models.parallel.layout import ParallelLayout
from penstock.worker.models.parallel.shares import linear_sizes, shares_of
from penstock.worker.models.placing.packed_linear import pack_linear_layers
from penstock.worker.models.weights.live_state import empty_module
from penstock.worker.models.weights.movable import ModelWeights
from penstock.worker.models.weights.part_state import joined_state, part_path, write_part

from ..lean_models import BLOCK_SIZE, NUM_BLOCKS, SETTINGS, logits_of, make_model, make_step
from .seeing_ranks import serve_images
from .two_rank_engine import serve_stages, two_in_flight

Layout = list[Any]


class Echoed:
    """A forward whose logits all ranks have: so each runs the same scheduler, as if it were alone."""

    def __init__(self, model: LoadedModel) -> None:
        self._forward, self._vocab_size = model.forward, model.vocab_size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._forward, name)

    def run(self, step: ModelInput) -> Tensor:
        logits = self._forward.run(step).contiguous()
        if dist.get_rank():
            logits = logits.new_empty(len(step.logit_rows), self._vocab_size)
        dist.broadcast(logits, 0)
        return logits


def echoed(model: LoadedModel) -> LoadedModel:
    """The model with a forward whose logits all ranks have."""
    forward: Any = Echoed(model)
    return dataclasses.replace(model, forward=forward)


def two_steps(forward: Forward) -> list[ModelInput]:
    """Prompts of different requests; caches are made for them."""
    forward.allocate(NUM_BLOCKS, BLOCK_SIZE, 3, torch.device("cpu"))
    token_ids, table = torch.arange(90).view(3, 30), torch.arange(24).view(3, 8)
    return [make_step(work, [0, 0, 0], token_ids, table, BLOCK_SIZE) for work in (((0, 9),), ((1, 4), (2, 13)))]


@cache
def groups_of(tensor: int, pipeline: int, is_expert_parallel: bool) -> RankGroups:
    """Ranks sum in memory that they share, as engines do where the kernels are compiled; they compute by the others."""
    native.load()
    try:
        return RankGroups(ParallelLayout(tensor, pipeline, is_expert_parallel), dist.get_rank(), timeout_s=60)
    finally:
        native.unload()


def load(folder: str, layout: Layout, **options: Any) -> LoadedModel:
    config = EngineConfig(model=folder, max_model_len=trial.MAX_MODEL_LEN, num_threads=1, **options)
    return load_model(config, Path(folder), groups_of(*layout))


def describe(model: LoadedModel) -> dict[str, Any]:
    return {
        "mode": model.forward.mode,
        "bytes_per_token": model.forward.bytes_per_token,
        "num_parameters": model.num_parameters,
        "weight_bytes": ModelWeights(model.weights, lambda: model.weights).num_bytes,
    }


def serve(folder: str, layout: Layout, prompts: list[list[int]], tokens: list[list[int]]) -> dict[str, Any]:
    """Run the survey's comparison through engines."""
    model = echoed(load(folder, layout))
    run = partial(trial.run_engine, model=model)
    told = trial.compare(Path(folder), trial.Expectation(prompts, tokens), model.forward, run)
    return describe(model) | {"told": told}


def only_load(folder: str, layout: Layout, **options: Any) -> dict[str, Any]:
    return describe(load(folder, layout, **options))


def tried_bits(folder: str, layout: Layout, *, is_compiled: bool) -> dict[str, Any]:
    """Whether tokens keep their bits in forwards of any size, by what the part says of itself and by trial."""
    groups_of(*layout)
    if is_compiled:
        native.load()
    try:
        model = echoed(load(folder, layout, deterministic=True))
        return {"alone": model.is_row_independent, "kept": is_invariant_in_any_size(model)}
    finally:
        native.unload()


def cut(module: PreTrainedModel, groups: RankGroups) -> ForwardSettings:
    """Leave the part of this rank, and say how it is computed."""
    plan = plan_of_part(read_decoder(module, SETTINGS.max_model_len), groups.layout, groups.rank)
    cut_decoder(module, groups)
    return ForwardSettings(SETTINGS.max_model_len, groups=groups, plan=plan)


@torch.inference_mode()
def lean_logits(variant: str, layout: Layout, **changed: Any) -> dict[str, Any]:
    """Return how far the logits of a lean part are from those of the whole model by the general way."""
    groups = groups_of(*layout)
    expected = logits_of(PackedForward(make_model(variant, torch.float32, **changed), SETTINGS))
    module = make_model(variant, torch.float32, **changed)
    check_layout(module.config, groups.layout, variant)
    settings = cut(module, groups)
    actual = logits_of(lean_forward(module, settings))
    if groups.rank:
        return {"error": 0.0}
    return {"error": max((ours - own).abs().max().item() for ours, own in zip(actual, expected, strict=True))}


def with_random_adapter(slots: AdapterSlots) -> AdapterSlots:
    """Put an adapter of all layers into slot 0, on every rank its part of the same one."""
    random, matrices = torch.Generator().manual_seed(0), {}
    for layer, (num_inputs, num_outputs) in sorted(slots.layers.items()):
        a, b = torch.randn(4, num_inputs, generator=random), torch.randn(num_outputs, 4, generator=random)
        matrices[layer] = LayerMatrices(a.to(slots.dtype), (b / num_inputs).to(slots.dtype))
    slots.assign(0, slots.prepare(slots.part_of(matrices)))
    slots.flush()
    return slots


@torch.inference_mode()
def stage_bits(variant: str) -> dict[str, Any]:
    """Whether two stages of packed layers give the bits of one rank, in bfloat16, where each rounding shows, with an
    adapter and without."""
    groups = groups_of(1, 2, False)
    native.load()
    try:
        logits = []
        for is_cut in (False, True):
            module = make_model(variant, torch.bfloat16)
            sizes = linear_sizes(module)
            lean = lean_forward(module, cut(module, groups) if is_cut else SETTINGS)
            shares = shares_of(sizes, module, groups) if is_cut else None
            pack_linear_layers(lean.network)
            forward = make_native(lean, BLOCK_SIZE)
            attached = attach_adapters(forward, variant, 1, 4, is_deterministic=False, shares=shares)
            slots = with_random_adapter(attached)  # held, since the forward has only addresses
            forward.allocate(NUM_BLOCKS, BLOCK_SIZE, 1, torch.device("cpu"))
            # Fewer tokens attend alike by other code, too.
            token_ids, table = torch.arange(30)[None], torch.arange(8)[None]
            steps = [make_step([(0, new)], [known], token_ids, table, BLOCK_SIZE) for known, new in ((0, 29), (29, 1))]
            adapted = [dataclasses.replace(step, token_lora=torch.zeros_like(step.token_ids)) for step in steps]
            logits.append([forward.run(step).float() for step in (*steps, *adapted)])
            slots.release(1)
    finally:
        native.unload()
    if groups.rank:
        return {"same": True, "adapted": True}
    return {"same": all(map(torch.equal, *logits)), "adapted": not torch.equal(logits[0][0], logits[0][2])}


@torch.inference_mode()
def in_flight(variant: str) -> dict[str, Any]:
    """Two steps of requests of their own under way at once, beside one after the other."""
    groups = groups_of(1, 2, False)
    module = make_model(variant, torch.float32)
    forward = lean_forward(module, cut(module, groups))
    assert isinstance(forward, StagedForward)
    first, second = two_steps(forward)
    expected = [forward.run(first), forward.run(second)]
    for step in (first, second):
        forward.start(step)
    actual = [forward.finish(), forward.finish()]
    return {"same": all(map(torch.equal, actual, expected)), "differ": not torch.equal(*expected)}


@torch.inference_mode()
def sleep(folder: str, layout: Layout) -> dict[str, Any]:
    """Weights that were discarded are read again, each rank its own."""
    config = EngineConfig(model=folder, max_model_len=trial.MAX_MODEL_LEN, num_threads=1)
    model = load(folder, layout)
    step, _ = two_steps(model.forward)
    before = model.forward.run(step)
    weights = ModelWeights(model.weights, lambda: load_weights(config, Path(folder), model))
    weights.release(2)
    weights.restore()
    return {"same": torch.equal(model.forward.run(step), before)}


def saved(folder: str, layout: Layout, into: str, mode: str) -> dict[str, Any]:
    """All weights by what each rank writes, beside those of the files that they were read from."""

    def read_for_mode(*arguments: Any) -> ReadModel:
        return dataclasses.replace(read_model(*arguments), modes=(mode,))

    config = EngineConfig(model=folder, max_model_len=trial.MAX_MODEL_LEN, num_threads=1)
    load_native_kernels(config)
    loader.read_model = read_for_mode
    try:
        model = load(folder, layout)
    finally:
        loader.read_model = read_model
    paths = [part_path(into, rank) for rank in range(2)]
    write_part(model, lambda: empty_module(config, Path(folder), model), paths[dist.get_rank()])
    dist.barrier()
    if dist.get_rank():
        return {}
    state = joined_state(model, lambda: empty_module(config, Path(folder), model), paths)
    original = load_file(Path(folder) / "model.safetensors")
    known = original.keys() & state.keys()
    return {
        "names": sorted(original.keys() ^ state.keys()),
        "different": sorted(name for name in known if not torch.equal(original[name], state[name])),
        "shares": [path.stat().st_size for path in paths],
    }


@torch.inference_mode()
def choose(variant: str, *, is_miscut: bool) -> dict[str, Any]:
    """Choose a way for a part, of which the second layer may have its heads in a wrong order.

    Rank 1 is told as well what the logits are to be, and has none that it could compare.
    """
    groups = groups_of(2, 1, False)
    module = make_model(variant, torch.float32)
    vocab_size = module.config.vocab_size
    truth = run_reference(module, variant, vocab_size).to(module.device, groups.of_rank_zero)
    settings = cut(module, groups)
    if is_miscut:
        output: Any = module.model.layers[1].self_attn.o_proj.inner
        output.weight.copy_(output.weight.flip(1))
    modes = ("lean", "packed")
    forward, _ = choose_forward(module, variant, vocab_size, settings, reference=truth, modes=modes, is_whole=False)
    return {"mode": forward.mode}


def pipelined(folder: str, meeting: str, prompts: list[list[int]], tokens: list[list[int]]) -> dict[str, Any]:
    return serve_stages(folder, groups_of(1, 2, False), meeting, prompts, tokens)


def flying(folder: str, meeting: str, prompts: list[list[int]]) -> dict[str, Any]:
    return two_in_flight(folder, groups_of(1, 2, False), meeting, prompts)


def see(name: str, folder: str, layout: Layout, meeting: str) -> dict[str, Any]:
    return serve_images(name, folder, groups_of(*layout), meeting)


JOBS: dict[str, Callable[..., dict[str, Any]]] = {
    job.__name__: job
    for job in (
        serve,
        only_load,
        tried_bits,
        lean_logits,
        stage_bits,
        in_flight,
        sleep,
        saved,
        choose,
        pipelined,
        flying,
        see,
    )
}


def main(rank: int, world: int, meeting: str, answers_fd: int) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    transformers_logging.set_verbosity_error()
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    with os.fdopen(answers_fd, "w", buffering=1) as answers:
        for line in sys.stdin:
            name, arguments = json.loads(line)
            try:
                answer = JOBS[name](**arguments)
            except ConfigurationError as error:
                answer = {"refusal": str(error)}
            except Exception:
                answer = {"failure": traceback.format_exc()}
            answers.write(json.dumps(answer) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
