"""One model over two ranks: real processes, real collectives; tokens of transformers' own ``generate``.

One pair of processes serves all tests here, since its start takes seconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import transformers
from transformers.distributed.configuration_utils import DistributedConfig

from penstock.ops.lab.survey import trial
from penstock.ops.lab.survey.images.models import write_vision_model
from penstock.ops.lab.survey.outcome import SAME, WAYS, WAYS_WITH_IMAGES
from penstock.ops.lab.survey.small_config import small_config
from penstock.shared.errors import ConfigurationError, ModelLoadError
from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.models.loaded import LoadedModel
from penstock.worker.models.loading import reading
from penstock.worker.models.parallel.layout import ParallelLayout
from penstock.worker.models.parallel.planned import planned_options
from penstock.worker.models.weights.movable import ModelWeights

from ....warm_python import WARM_PYTHON_VARIABLE
from ..lean_models import SWITCHES, VARIANTS

pytestmark = pytest.mark.xdist_group("ranks")

ROOT = Path(__file__).parents[4]
ALL_SAME = dict.fromkeys(WAYS, SAME)
TENSOR, STAGES, EXPERTS = [2, 1, False], [1, 2, False], [2, 1, True]
NUM_LAYERS, NUM_NEW_TOKENS, PROMPT_LENS = 2, 10, (17, 40, 9)
HAS_EXPERT_RANKS = "ep_size" in DistributedConfig.__dataclass_fields__
needs_expert_ranks = pytest.mark.skipif(not HAS_EXPERT_RANKS, reason="needs transformers 5.23")


class Pair:
    """Two ranks that do the same jobs."""

    def __init__(self, folder: Path, python: str) -> None:
        self._answers = []
        self._processes = []
        for rank in range(2):
            reader, writer = os.pipe()
            command = [python, "-m", "tests.integration.models.ranks.rank_process"]
            self._processes.append(
                subprocess.Popen(
                    [*command, str(rank), "2", str(folder / "meeting"), str(writer)],
                    cwd=ROOT,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[writer],
                    text=True,
                )
            )
            os.close(writer)
            self._answers.append(os.fdopen(reader))

    def do(self, job: str, **arguments: Any) -> list[dict[str, Any]]:
        """Return what each rank answers."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps([job, arguments]) + "\n")
            process.stdin.flush()
        answers = [json.loads(answers.readline()) for answers in self._answers]
        failures = [answer["failure"] for answer in answers if "failure" in answer]
        assert not failures, "\n".join(failures)
        return answers

    def close(self) -> None:
        with ExitStack() as stack:
            for process, answers in zip(self._processes, self._answers, strict=True):
                stack.callback(answers.close)
                stack.enter_context(process)
                stack.callback(process.kill)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pair = Pair(tmp_path_factory.mktemp("pair"), os.environ.get(WARM_PYTHON_VARIABLE, sys.executable))
    yield pair
    pair.close()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, trial.Expectation]]:
    """A small model of a type, and what transformers generates with it; the same for the same type and fields.

    Two layers, and three prompts that have one preempted: a step is dozens of collectives, in each of which processes
    wait for each other.
    """
    made: dict[str, tuple[Path, trial.Expectation]] = {}
    prompts = [prompt for prompt in trial.make_prompts() if len(prompt) in PROMPT_LENS]

    def find(model_type: str, **fields: Any) -> tuple[Path, trial.Expectation]:
        key = f"{model_type} {fields}"
        if key not in made:
            config = small_config(model_type)
            if getattr(config, "layer_types", None):
                fields = {"layer_types": config.layer_types[:NUM_LAYERS], **fields}
            config.update({"num_hidden_layers": NUM_LAYERS, **fields})
            folder = tmp_path_factory.mktemp("model")
            made[key] = folder, trial.find_model(config, folder, NUM_NEW_TOKENS, prompts)
        return made[key]

    return find


def serve(pair: Pair, found: tuple[Path, trial.Expectation], layout: list[Any]) -> list[dict[str, Any]]:
    folder, expectation = found
    return pair.do("serve", folder=str(folder), layout=layout, prompts=expectation.prompts, tokens=expectation.tokens)


LEAN: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen3": ("qwen3", {}),
    "mixtral": ("mixtral", {}),
}


@pytest.mark.parametrize(
    ("name", "layout"),
    [*((name, TENSOR) for name in LEAN), ("llama", STAGES), ("mixtral", STAGES)],
    ids=lambda value: value if isinstance(value, str) else f"tp{value[0]}pp{value[1]}",
)
def test_lean_parts_give_the_tokens_of_transformers(
    name: str, layout: list[Any], pair: Pair, found: Callable[..., tuple[Path, trial.Expectation]]
) -> None:
    model_type, fields = LEAN[name]
    model = found(model_type, **fields)
    whole = trial.load(model[0])
    first, second = serve(pair, model, layout)
    assert first["told"] == ALL_SAME
    assert first["mode"] == second["mode"] == "lean"
    for part in (first, second):
        assert part["bytes_per_token"] * 2 == whole.forward.bytes_per_token
        assert part["num_parameters"] == whole.num_parameters
    # Embeddings and norms are whole on ranks of one stage, and with the first of several.
    assert second["weight_bytes"] < 0.75 * ModelWeights(whole.weights, lambda: whole.weights).num_bytes


@pytest.mark.parametrize(("model_type", "shares_cache"), [("gemma2", True), ("olmo2", False)])
def test_transformers_plans_give_its_tokens(
    model_type: str, shares_cache: bool, pair: Pair, found: Callable[..., tuple[Path, trial.Expectation]]
) -> None:
    """olmo2 normalises all heads together, so its plan leaves keys and values whole."""
    check_planned(serve(pair, found(model_type), TENSOR), trial.load(found(model_type)[0]), shares_cache=shares_cache)


@needs_expert_ranks
@pytest.mark.parametrize(("model_type", "shares_cache"), [("mixtral", True), ("qwen3_moe", True), ("gpt_oss", False)])
def test_ranks_that_share_experts_give_the_tokens_of_transformers(
    model_type: str, shares_cache: bool, pair: Pair, found: Callable[..., tuple[Path, trial.Expectation]]
) -> None:
    """Ranks split only the experts of gpt_oss, which has no other plan."""
    parts = serve(pair, found(model_type), EXPERTS)
    check_planned(parts, trial.load(found(model_type)[0]), shares_cache=shares_cache)


def check_planned(parts: list[dict[str, Any]], whole: LoadedModel, *, shares_cache: bool) -> None:
    assert parts[0]["told"] == ALL_SAME
    for part in parts:
        assert part["mode"] == "packed"
        assert part["bytes_per_token"] * (2 if shares_cache else 1) == whole.forward.bytes_per_token
        assert part["num_parameters"] == whole.num_parameters


@pytest.mark.parametrize("layout", [TENSOR, STAGES], ids=["tensor", "stages"])
@pytest.mark.parametrize("variant", sorted(VARIANTS.keys() - SWITCHES.keys()))
def test_logits_of_every_family_are_those_of_the_whole_model(variant: str, layout: list[Any], pair: Pair) -> None:
    """Models have three layers, 97 words, biases, windows by layer and tied embeddings."""
    assert pair.do("lean_logits", variant=variant, layout=layout)[0]["error"] < 3e-4


@pytest.mark.parametrize("variant", ["llama", "mixtral"])
def test_stages_give_the_bits_of_one_rank(variant: str, pair: Pair) -> None:
    assert pair.do("stage_bits", variant=variant)[0] == {"same": True, "adapted": True}


def test_two_ranks_may_have_the_same_head_of_keys(pair: Pair) -> None:
    answers = pair.do("lean_logits", variant="llama", layout=TENSOR, num_key_value_heads=1)
    assert answers[0]["error"] < 3e-4


def test_the_first_stage_may_be_two_steps_ahead(pair: Pair) -> None:
    assert pair.do("in_flight", variant="llama")[0] == {"same": True, "differ": True}


def test_engines_with_a_batch_in_each_stage_give_the_tokens_of_transformers(
    pair: Pair, found: Callable[..., tuple[Path, trial.Expectation]], tmp_path: Path
) -> None:
    folder, expectation = found("llama")
    meeting = {"folder": str(folder), "meeting": str(tmp_path / "engine")}
    first, _ = pair.do("pipelined", **meeting, prompts=expectation.prompts, tokens=expectation.tokens)
    assert first == {"told": ALL_SAME | {"resumed": SAME}, "most": 2}


def test_one_stage_computes_a_batch_while_the_next_stands_in_another(
    pair: Pair, found: Callable[..., tuple[Path, trial.Expectation]], tmp_path: Path
) -> None:
    folder, expectation = found("llama")
    prompts = expectation.prompts[:3]
    first, _ = pair.do("flying", folder=str(folder), meeting=str(tmp_path / "engine"), prompts=prompts)
    assert first == {"outputs": [[], []], "flying": [["0", "1"], ["2"]], "landed": ["0", "1"]}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("llava", TENSOR),
        ("qwen3_vl", TENSOR),
        ("qwen3_vl_moe", TENSOR),
        ("gemma3", STAGES),
    ],
    ids=lambda value: value if isinstance(value, str) else f"tp{value[0]}pp{value[1]}",
)
def test_models_that_read_images_give_the_tokens_of_transformers(
    name: str, layout: list[Any], pair: Pair, tmp_path: Path
) -> None:
    """Covers one and two images in a batch, chunks that end inside images, preemption and resumption.

    Only the first rank sees, so one model stands for each kind of text decoder. What gemma3's tokens see of an image
    does not depend on heads.
    """
    folder = tmp_path / "model"
    folder.mkdir()
    write_vision_model(name, folder)
    first, _ = pair.do("see", name=name, folder=str(folder), layout=layout, meeting=str(tmp_path / "engine"))
    assert first == dict.fromkeys(WAYS_WITH_IMAGES, SAME)


def test_all_ranks_decide_as_rank_0_does(pair: Pair) -> None:
    """Rank 1 has no logits to compare, and must not try the next mode while rank 0 continues."""
    assert pair.do("choose", variant="qwen2 moe", is_miscut=False) == [{"mode": "lean"}] * 2


def test_a_wrong_split_is_detected_on_all_ranks(pair: Pair) -> None:
    """The split model agrees with itself, so only a comparison with the whole model detects the error."""
    for answer in pair.do("choose", variant="qwen2 moe", is_miscut=True):
        assert "it gives other results when requests are batched" in answer["refusal"]


@pytest.mark.parametrize("layout", [TENSOR, STAGES], ids=["tensor", "stages"])
def test_weights_return_to_each_rank_after_sleep(
    layout: list[Any], pair: Pair, found: Callable[..., tuple[Path, trial.Expectation]]
) -> None:
    assert [answer["same"] for answer in pair.do("sleep", folder=str(found("llama")[0]), layout=layout)] == [True] * 2


@pytest.mark.parametrize(
    "options",
    [
        {"quantization": "int8"},
        {"dtype": "bfloat16"},
        {"kv_cache_dtype": "fp8"},
        {"kv_cache_dtype": "int8"},
        {"load_format": "dummy"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_parts_take_the_options_of_whole_models(
    options: dict[str, Any], pair: Pair, found: Callable[..., tuple[Path, trial.Expectation]]
) -> None:
    """Loading compares their results with the whole model."""
    answers = pair.do("only_load", folder=str(found("llama")[0]), layout=TENSOR, **options)
    assert [answer.get("mode", answer) for answer in answers] == ["lean"] * 2


@pytest.mark.parametrize(
    ("model_type", "fields", "layout", "is_compiled", "keeps"),
    [
        ("llama", {}, TENSOR, True, True),
        ("llama", {"attention_bias": True, "mlp_bias": True}, STAGES, True, True),
        ("qwen3", {"tie_word_embeddings": True}, TENSOR, True, True),
        ("llama", {}, TENSOR, False, False),
        ("llama", {"head_dim": 8}, TENSOR, True, False),  # heads of eight, which no loop of ours attends to
        ("qwen2_moe", {}, TENSOR, True, False),  # experts get as many rows as are sent to them
        ("gemma2", {}, TENSOR, True, False),  # by transformers' plan and code
        ("llama", {"hidden_act": "gelu"}, TENSOR, True, False),  # torch's, element by element
    ],
)
def test_parts_that_compute_tokens_independently_keep_their_bits(
    model_type: str,
    fields: dict[str, Any],
    layout: list[Any],
    is_compiled: bool,
    keeps: bool,
    pair: Pair,
    found: Callable[..., tuple[Path, trial.Expectation]],
) -> None:
    """Other parts use forwards of fixed sizes."""
    told, _ = pair.do("tried_bits", folder=str(found(model_type, **fields)[0]), layout=layout, is_compiled=is_compiled)
    assert told == {"alone": keeps, "kept": keeps}


SAVED: dict[str, tuple[str, dict[str, Any], list[Any], str]] = {
    "lean": ("llama", {"attention_bias": True, "mlp_bias": True}, TENSOR, "lean"),
    "stages": ("llama", {"tie_word_embeddings": True}, STAGES, "lean"),
    "one head of keys for two": ("qwen3", {"num_key_value_heads": 1, "tie_word_embeddings": True}, TENSOR, "lean"),
    "experts and a shared one": ("qwen2_moe", {}, TENSOR, "lean"),
    "stages of experts": ("mixtral", {}, STAGES, "lean"),
    "its own feed-forward part": ("llama", {"hidden_act": "mish"}, TENSOR, "lean"),
    "packed": ("mixtral", {}, TENSOR, "packed"),
    "a plan": ("gemma2", {}, TENSOR, "packed"),
    "a plan of fused projections": ("phi3", {}, TENSOR, "packed"),
    "a plan of fused experts": ("deepseek_v3", {}, TENSOR, "packed"),
    "whole experts": ("qwen3_moe", {}, EXPERTS, "packed"),
    "nothing but experts": ("gpt_oss", {}, EXPERTS, "packed"),
}


@pytest.mark.parametrize("name", SAVED)
def test_files_written_by_ranks_form_the_whole_model(
    name: str, pair: Pair, found: Callable[..., tuple[Path, trial.Expectation]], tmp_path: Path
) -> None:
    """To the bit, by the names of the files."""
    model_type, fields, layout, mode = SAVED[name]
    if layout is EXPERTS and not HAS_EXPERT_RANKS:
        pytest.skip("needs transformers 5.23")
    folder = str(found(model_type, **fields)[0])
    told, _ = pair.do("saved", folder=folder, layout=layout, into=str(tmp_path), mode=mode)
    assert (told.get("names"), told.get("different")) == ([], []), told
    # Each writes what it has.
    assert max(told["shares"]) < 0.8 * sum(told["shares"])


@pytest.mark.parametrize(("name", "mode"), [("llava", "lean"), ("qwen3_vl", "packed")])
def test_files_written_by_ranks_form_the_whole_vision_model(name: str, mode: str, pair: Pair, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write_vision_model(name, folder)
    told, _ = pair.do("saved", folder=str(folder), layout=TENSOR, into=str(tmp_path), mode=mode)
    assert (told.get("names"), told.get("different")) == ([], []), told


REFUSALS: dict[str, tuple[str, dict[str, Any], list[Any], dict[str, Any], str]] = {
    "heads": (
        "llama",
        {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 3},
        TENSOR,
        {},
        "tensor_parallel_size is 2, but the 3 attention heads of LlamaForCausalLM cannot be shared evenly by as many "
        "ranks; use 1 or 3",
    ),
    "feed-forward part": (
        "llama",
        {"intermediate_size": 95},
        TENSOR,
        {},
        "tensor_parallel_size is 2, but the 95 intermediate_size of LlamaForCausalLM cannot be shared evenly by as "
        "many ranks; use 1, 5 or 19",
    ),
    "more stages than layers": (
        "llama",
        {"num_hidden_layers": 1},
        STAGES,
        {},
        "pipeline_parallel_size is 2, but LlamaForCausalLM has 1 layers; use at most as many stages",
    ),
    "key heads of a plan": (
        "gemma2",
        {"num_key_value_heads": 1},
        TENSOR,
        {},
        "tensor_parallel_size is 2, but the 1 heads of keys and values of Gemma2ForCausalLM cannot be shared evenly by "
        "as many ranks; use 1",
    ),
    "stages of a plan": (
        "gemma2",
        {},
        STAGES,
        {},
        "pipeline_parallel_size is 2, but Gemma2ForCausalLM is not among the families that are computed in stages; use "
        "tensor_parallel_size 2 instead",
    ),
    "no plan": (
        "gpt2",
        {},
        TENSOR,
        {},
        f"tensor_parallel_size is 2, but transformers {transformers.__version__} has no plan for how ranks share "
        "GPT2LMHeadModel; use tensor_parallel_size 1",
    ),
    "stages of what has no plan": (
        "gpt2",
        {},
        STAGES,
        {},
        "pipeline_parallel_size is 2, but GPT2LMHeadModel is not among the families that are computed in stages; use "
        "pipeline_parallel_size 1",
    ),
    "a wrong plan": (
        "gemma3n_text",
        {},
        TENSOR,
        {},
        "tensor_parallel_size is 2, but ranks that share Gemma3nForCausalLM by the plan of transformers "
        f"{transformers.__version__} make other tokens than the whole model does; use tensor_parallel_size 1",
    ),
    "quantised by a plan": (
        "gemma2",
        {},
        TENSOR,
        {"quantization": "int8"},
        "tensor_parallel_size is 2, but Gemma2ForCausalLM is shared by transformers' own plan, which keeps linear "
        "layers as they are, and quantization is 'int8'; leave it out",
    ),
    "quantised with whole experts": (
        "mixtral",
        {},
        EXPERTS,
        {"quantization": "int8"},
        "enable_expert_parallel is set, and MixtralForCausalLM is then shared by transformers' own plan, which keeps "
        "linear layers as they are, and quantization is 'int8'; leave it out",
    ),
    "prompt embeddings by a plan": (
        "gemma2",
        {},
        TENSOR,
        {"enable_prompt_embeds": True},
        "tensor_parallel_size is 2, but Gemma2ForCausalLM is shared by transformers' own plan, which shares the "
        "embeddings, too; leave enable_prompt_embeds out, or use one rank",
    ),
    "adapters by a plan": (
        "gemma2",
        {},
        TENSOR,
        {"enable_lora": True},
        "tensor_parallel_size is 2, but Gemma2ForCausalLM is shared by transformers' own plan, which changes linear "
        "layers; leave enable_lora out, or use one rank",
    ),
    "pooling": (
        "llama",
        {},
        STAGES,
        {"runner": "pooling"},
        "pipeline_parallel_size is 2, but a model that pools is computed by one rank (LlamaForCausalLM): use "
        "tensor_parallel_size 1 and pipeline_parallel_size 1, and more engines",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_models_that_ranks_cannot_split_are_refused_by_name(name: str, pair: Pair, tmp_path: Path) -> None:
    model_type, fields, layout, options, sentence = REFUSALS[name]
    config = small_config(model_type)
    config.update(fields)
    trial.write_model(config, tmp_path)
    assert pair.do("only_load", folder=str(tmp_path), layout=layout, **options) == [{"refusal": sentence}] * 2


@pytest.mark.parametrize(
    ("name", "layout", "sentence"),
    [
        (
            "qwen3_vl",
            STAGES,
            "pipeline_parallel_size is 2, but Qwen3VLForConditionalGeneration has positions in three axes, which are "
            "computed in one stage; use tensor_parallel_size 2 instead",
        ),
        (
            "llava",
            EXPERTS,
            "enable_expert_parallel is set, but LlavaForConditionalGeneration reads images, and ranks share a part of "
            "each expert of such models; leave it out",
        ),
    ],
    ids=["three axes in stages", "experts"],
)
def test_vision_models_that_ranks_cannot_split_are_refused_by_name(
    name: str, layout: list[Any], sentence: str, pair: Pair, tmp_path: Path
) -> None:
    write_vision_model(name, tmp_path)
    assert pair.do("only_load", folder=str(tmp_path), layout=layout) == [{"refusal": sentence}] * 2


def test_another_kind_of_text_decoder_is_refused_by_name(pair: Pair, tmp_path: Path) -> None:
    lfm2_vl: Any = transformers.AutoConfig.for_model("lfm2_vl")
    lfm2_vl.architectures = ["Lfm2VlForConditionalGeneration"]
    lfm2_vl.save_pretrained(tmp_path)
    sentence = (
        "tensor_parallel_size is 2, but Lfm2VlForConditionalGeneration reads images, and ranks do not share its "
        "text decoder (lfm2): use tensor_parallel_size 1 and pipeline_parallel_size 1, and more engines"
    )
    assert pair.do("only_load", folder=str(tmp_path), layout=TENSOR) == [{"refusal": sentence}] * 2


def test_states_are_refused_on_all_ranks(pair: Pair, tmp_path: Path) -> None:
    """Ranks cannot split jamba's states, even if transformers has a plan for its other layers."""
    trial.write_model(small_config("jamba"), tmp_path)
    for answer in pair.do("only_load", folder=str(tmp_path), layout=TENSOR):
        assert answer["refusal"].startswith("tensor_parallel_size is 2, ")
        assert "JambaForCausalLM" in answer["refusal"]
        assert "use tensor_parallel_size 1" in answer["refusal"]


def test_a_parallel_plan_that_fails_is_named_as_the_cause(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(reading, "planned_options", lambda *_: {})
    monkeypatch.setattr(reading, "read_module", lambda *_: Broken())
    groups: Any = SimpleNamespace(layout=ParallelLayout(2))
    config = EngineConfig(model=str(tmp_path))
    told = "tensor_parallel_size is 2, and by transformers' plan Broken cannot be served: on its own .*; use one rank"
    with pytest.raises(ModelLoadError, match=told):
        reading._planned_part(tmp_path, small_config("gemma2"), "Broken", config, torch.device("cpu"), groups, 64)


class Broken(torch.nn.Module):
    """Nothing can be computed with it."""


def test_head_counts_that_differ_by_layer_are_named_as_the_cause() -> None:
    class ByLayer:
        model_type = "by_layer"
        base_model_tp_plan: ClassVar = {"layers.*.self_attn.q_proj": "colwise"}

        @property
        def num_attention_heads(self) -> int:
            raise RuntimeError("it is a per-layer attribute")

    with pytest.raises(ConfigurationError, match=r"the layers of It differ in num_attention_heads, .* use tensor"):
        planned_options(ByLayer(), ParallelLayout(2), "It", torch.device("cpu"))


@pytest.mark.skipif(HAS_EXPERT_RANKS, reason="transformers is new enough")
def test_experts_of_an_older_transformers_are_refused(pair: Pair, tmp_path: Path) -> None:
    trial.write_model(small_config("mixtral"), tmp_path)
    answers = pair.do("only_load", folder=str(tmp_path), layout=EXPERTS)
    assert all("enable_expert_parallel needs transformers 5.23 or newer" in answer["refusal"] for answer in answers)
