"""An ordering policy of a distribution of the operator's own decides when an engine runs a request."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from penstock.shared.errors import ConfigurationError
from penstock.shared.messages.core import EngineCoreOutput
from penstock.shared.messages.requests import EngineCoreRequest
from penstock.worker.engine.core.engine_core import EngineCore
from penstock.worker.engine.own_ordering import ORDERING_FAILED, load_ordering

from .... import orders
from ..harness import generate, request

# By request: its priority, and how many tokens it may have, of which how many were delivered before.
ASKED = {"long": (0, 9, 0), "short": (0, 3, 0), "equal": (0, 3, 0), "resumed": (0, 9, 8), "urgent": (-1, 9, 0)}


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The policies as a distribution leaves them where Python finds packages."""
    (tmp_path / "my_orders.py").write_text(Path(orders.__file__).read_text())
    folder = tmp_path / "my_orders-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: my-orders\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text("[penstock.ordering_policies]\nshortest = my_orders:ShortestFirst\n")
    monkeypatch.syspath_prepend(tmp_path)


def ends(core: EngineCore) -> list[EngineCoreOutput]:
    found = []
    while core.has_work:
        found += [output for output in core.step_fn() if output.finished]
        core.check_invariants()
    return found


def test_requests_run_in_the_order_of_the_plug_in(make_core: Callable[..., EngineCore]) -> None:
    core = make_core("llama", max_num_seqs=1, scheduling_policy="shortest", enable_prefix_caching=False)
    for request_id, (priority, max_tokens, num_delivered) in ASKED.items():
        delivered = list(range(10, 10 + num_delivered))
        message = request(request_id, [5, 6, 7], delivered, max_tokens=max_tokens)
        core.add_request(msgspec.structs.replace(message, priority=priority))
    assert [output.request_id for output in ends(core)] == ["urgent", "resumed", "short", "equal", "long"]


def test_preempted_requests_keep_their_place_and_their_tokens(
    make_core: Callable[..., EngineCore], prompts: list[list[int]]
) -> None:
    lengths = [20, 9, 14, 20, 17, 11]

    def asked() -> list[EngineCoreRequest]:
        return [request(str(i), prompts[i], max_tokens=lengths[i]) for i in range(len(prompts))]

    expected = generate(make_core("llama"), asked())
    core = make_core("llama", num_blocks=18, block_size=4, max_model_len=64, scheduling_policy="shortest")
    assert generate(core, asked()) == expected
    assert core.scheduler.stats().num_preemptions > 0


def test_a_request_without_a_key_ends_alone(make_core: Callable[..., EngineCore]) -> None:
    core = make_core("llama", scheduling_policy="my_orders:Broken")
    failed = {}
    for request_id in ("raises", "fine", "nan"):
        end = core.add_request(request(request_id, [5, 6, 7], max_tokens=3))
        if end is not None:
            assert end.error is not None
            failed[request_id] = (end.error.code, end.error.message)
    assert failed.keys() == {"raises", "nan"}
    assert {code for code, _ in failed.values()} == {ORDERING_FAILED}
    assert "my_orders:Broken raised KeyError" in failed["raises"][1]
    assert "must give numbers that are not NaN, got nan" in failed["nan"][1]
    assert [output.request_id for output in ends(core)] == ["fine"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("my_orders:NoPolicy", "must be a subclass of RequestOrder"),
        ("my_orders:NotMade", "cannot be made: RuntimeError: no licence"),
        ("my_orders:Gone", "cannot be imported: AttributeError"),
    ],
)
def test_an_invalid_scheduling_policy_is_reported_at_the_start(name: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=f"--scheduling-policy {name} {said}"):
        load_ordering(name)
