"""FlashAttention's packages get the layouts, lengths and rules that give our results; stand-ins are in their place."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.kernels.paged_attention import PagedBatch, library, paged_attention

from .flash_attention import StandIns
from .paged_cases import make_case, naive

TWO, THREE = "FlashAttention 2", "FlashAttention 3"
WHOLE, LATER = [(9, 9), (21, 21)], [(9, 20), (6, 6), (3, 40)]
# Function of a package, its module, and the file that defines it.
SIGNATURES = [
    (StandIns.flash_attn_varlen_func, "flash_attn", "flash_attn_interface.py"),
    (StandIns.flash_attn_with_kvcache, "flash_attn_interface", ""),
]


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> StandIns:
    """Return the packages, which serve prompts of any length."""
    stand_ins: Any = StandIns()
    for name in (TWO, THREE):
        monkeypatch.setitem(sys.modules, library.LIBRARIES[name].package, stand_ins)
    monkeypatch.setattr(library, "MIN_PROMPT_LEN", 1)
    return stand_ins


@pytest.mark.parametrize("options", [{}, {"window": 4}, {"softcap": 3.0}, {"window": 30, "softcap": 3.0}])
@pytest.mark.parametrize(
    ("name", "rows", "block_size", "in_pages"),
    [
        (TWO, WHOLE, 7, [False]),
        (TWO, LATER, 256, [True]),
        (TWO, LATER, 7, None),
        (THREE, WHOLE, 7, []),
        (THREE, LATER, 16, []),
    ],
)
def test_results(
    name: str,
    rows: list[tuple[int, int]],
    block_size: int,
    in_pages: list[bool] | None,
    options: dict[str, Any],
    stand_ins: StandIns,
    assert_close: Callable[[Tensor, Tensor], None],
) -> None:
    """Earlier tokens in small blocks are not copied for FlashAttention 2: our kernel computes these."""
    case = make_case(rows, 4, 2, 24, 24, torch.bfloat16, block_size=block_size)
    assert_close(case.attend(scale=0.3, prompt_library=name, **options), naive(case, 0.3, **options))
    assert (stand_ins.num_calls, stand_ins.in_pages) == (in_pages is not None, in_pages or [])


def test_a_group_of_layers_has_its_own_blocks(
    stand_ins: StandIns, assert_close: Callable[[Tensor, Tensor], None]
) -> None:
    case = make_case(WHOLE, 4, 2, 24, 24, torch.bfloat16)
    old = case.batch
    tables, slots = (torch.stack([right * 0, right]) for right in (old.block_table, old.slot_mapping))
    batch = PagedBatch(
        tables[0], slots[0], old.query_lens, old.seq_lens, old.block_size, group_tables=tables, group_slots=slots
    )
    for name in ("flash", TWO, THREE):
        caches = case.query, case.key_cache, case.value_cache
        out = paged_attention(*caches, batch.for_group(1), scale=0.3, prompt_library=name)
        assert_close(out, naive(case, 0.3))
    assert stand_ins.num_calls == 2


@pytest.mark.parametrize("name", [TWO, THREE])
def test_what_no_library_serves(name: str, stand_ins: StandIns) -> None:
    """Decodes among prompts, sinks, slopes, masks of a model's own, and other numbers in the cache."""
    four = torch.linspace(-1.0, 2.0, 4)
    rules: list[dict[str, Any]] = [{"sinks": four}, {"alibi_slopes": four}, {"mask_rule": lambda *at: at[3] <= at[2]}]
    case = make_case(WHOLE, 4, 2, 24, 24, torch.bfloat16)
    for rule in rules:
        case.attend(scale=0.3, prompt_library=name, **rule)
    make_case([(1, 30), (9, 9)], 4, 2, 24, 24, torch.bfloat16).attend(scale=0.3, prompt_library=name)
    in_bytes = make_case(WHOLE, 4, 2, 24, 24, torch.bfloat16, cache_dtype=torch.int8)
    in_bytes.attend(scale=0.3, prompt_library=name)
    case.attend(scale=0.3, prompt_library=name, is_batch_invariant=True)
    assert stand_ins.num_calls == 0


def test_packages_are_found_without_being_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("flash_attn", "flash_attn_interface"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(library, "find_spec", lambda name: None if name == "flash_attn_interface" else find_spec(name))
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text("raise ImportError('undefined symbol')")
    monkeypatch.syspath_prepend(tmp_path)
    assert library.installed() == ["flash", "cuDNN", TWO]
    case = make_case([(600, 600)], 2, 1, 16, 16, torch.bfloat16)
    with pytest.raises(ImportError, match="undefined symbol"):
        case.attend(scale=0.3, prompt_library=TWO)


@pytest.mark.parametrize(("function", "package", "file"), SIGNATURES)
def test_stand_ins_have_the_signatures_of_the_packages(function: Callable[..., Any], package: str, file: str) -> None:
    """Read from their source, since neither can be imported without CUDA."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"{package} is not installed")
    source = Path(spec.origin).with_name(file) if file else Path(spec.origin)
    definitions = (node for node in ast.parse(source.read_text()).body if isinstance(node, ast.FunctionDef))
    (definition,) = (node.args for node in definitions if node.name == function.__name__)
    defaults = [ast.literal_eval(node) for node in definition.defaults]
    _, *own = inspect.signature(function).parameters.values()
    assert [parameter.name for parameter in own] == [argument.arg for argument in definition.args]
    assert [parameter.default for parameter in own[-len(defaults) :]] == defaults
