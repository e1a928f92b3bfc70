"""Plug-ins of real distributions, in folders as an installation leaves them: named, found, and loaded only then."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from penstock.shared.errors import ConfigurationError
from penstock.shared.process.plugins import (
    IO_PROCESSORS,
    LOGITS_PROCESSORS,
    ORDERING_POLICIES,
    RPC_MODULES,
    STAT_LOGGERS,
    load_module,
    load_object,
    plugins_of,
)
from penstock.worker.cli.listing import list_plugins
from penstock.worker.config.engine_config import EngineConfig

POINTS = f"""\
[{LOGITS_PROCESSORS}]
ban = my_plugin.parts:Ban
gone = my_plugin.parts:Gone

[{RPC_MODULES}]
counting = my_plugin.methods

[{STAT_LOGGERS}]
told = my_plugin.parts:Ban

[{ORDERING_POLICIES}]
shortest = my_plugin.orders:ShortestFirst

[{IO_PROCESSORS}]
tables = my_plugin.tables:Tables
"""


@pytest.fixture(autouse=True)
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    package = tmp_path / "my_plugin"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "parts.py").write_text("class Ban:\n    pass\n")
    (package / "methods.py").write_text("number = 7\n")
    install(tmp_path, "my-plugin", POINTS)
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_plugin"]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


def install(site: Path, name: str, points: str) -> None:
    folder = site / f"{name.replace('-', '_')}-1.2.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
    (folder / "entry_points.txt").write_text(points)


def test_a_plugin_is_loaded_when_it_is_named_and_not_before(capsys: pytest.CaptureFixture[str]) -> None:
    assert list_plugins(as_json=False) == 0
    assert "ban " in capsys.readouterr().out
    assert list_plugins(as_json=True) == 0
    listed = json.loads(capsys.readouterr().out)
    assert {
        "option": "--logits-processors",
        "name": "ban",
        "value": "my_plugin.parts:Ban",
        "distribution": "my-plugin 1.2",
    } in listed
    assert [one["name"] for one in listed if one["value"].startswith("my_plugin")] == [
        "ban",
        "gone",
        "counting",
        "told",
        "shortest",
        "tables",
    ]
    assert "my_plugin" not in sys.modules, "to be installed is not to be chosen"
    ban = load_object(LOGITS_PROCESSORS, "ban")
    assert ban is load_object(LOGITS_PROCESSORS, "my_plugin.parts:Ban") is load_object(STAT_LOGGERS, "told")
    assert load_module(RPC_MODULES, "counting").number == load_module(RPC_MODULES, "my_plugin.methods").number == 7


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("other", "--logits-processors 'other' is no entry point of the group penstock.logits_processors, .*ban, gone"),
        ("gone", r"--logits-processors gone \(my_plugin.parts:Gone\) cannot be imported: AttributeError"),
        ("my_plugin.parts:Gone", "--logits-processors my_plugin.parts:Gone cannot be imported: AttributeError"),
        ("nowhere.at.all:Ban", "cannot be imported: ModuleNotFoundError"),
    ],
)
def test_unloadable_plugins_are_named(name: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        load_object(LOGITS_PROCESSORS, name)
    with pytest.raises(ConfigurationError, match="--rpc-module nowhere_at_all cannot be imported"):
        load_module(RPC_MODULES, "nowhere_at_all")


def test_a_policy_is_known_to_its_option_and_loaded_by_the_engine(site: Path) -> None:
    for name in ("shortest", "my_plugin.orders:ShortestFirst"):
        assert EngineConfig(model="m", scheduling_policy=name).scheduling_policy == name
    assert "my_plugin" not in sys.modules
    with pytest.raises(ConfigurationError, match="must be one of fcfs, priority, shortest, or MODULE:CLASS, got 'lif"):
        EngineConfig(model="m", scheduling_policy="lifo")


def test_two_distributions_with_one_name_are_an_error_that_shows_both(site: Path) -> None:
    install(site, "other-plugin", f"[{LOGITS_PROCESSORS}]\nban = my_plugin.methods:number\n")
    assert len(plugins_of(LOGITS_PROCESSORS)["ban"]) == 2
    with pytest.raises(ConfigurationError, match=r"my_plugin.methods:number, my_plugin.parts:Ban"):
        load_object(LOGITS_PROCESSORS, "ban")
