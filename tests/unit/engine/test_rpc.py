"""Functions that are methods, and the forms of their results."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest

from penstock.shared.errors import ConfigurationError, EngineCallError, ValidationError
from penstock.worker.engine.rpc import RpcEngine, RpcMethods, import_rpc_modules, rpc_method

ENGINE = cast(RpcEngine, object())


def module(**functions: Any) -> ModuleType:
    source_module = ModuleType("made")
    vars(source_module).update(functions)
    return source_module


@rpc_method("add")
def add(engine: RpcEngine, left: int, *, right: int = 1) -> dict[str, Any]:
    assert engine is ENGINE
    return {"sum": left + right, "pair": (left, right)}


@rpc_method("slow", takes_long=True)
def slow(engine: RpcEngine) -> object:
    return object()


def test_a_method_gets_the_engine_and_gives_plain_data() -> None:
    methods = RpcMethods([module(add=add, slow=slow, not_marked=len)])
    assert methods.run(ENGINE, "add", [2], {"right": 5}) == {"sum": 7, "pair": [2, 5]}
    assert [methods.takes_long(name) for name in ("add", "slow", "unknown")] == [False, True, False]


def test_only_registered_methods_can_be_called() -> None:
    methods = RpcMethods([module(add=add, slow=slow, not_marked=len)])
    for name in ("not_marked", "__class__", "run", ""):
        with pytest.raises(ValidationError, match="is registered; available: add, slow"):
            methods.run(ENGINE, name, [], {})


def test_a_result_that_is_no_plain_data_is_an_error() -> None:
    with pytest.raises(EngineCallError, match="the result of RPC method 'slow' cannot be sent"):
        RpcMethods([module(slow=slow)]).run(ENGINE, "slow", [], {})


def test_two_functions_cannot_have_one_name() -> None:
    other = rpc_method("add")(lambda engine: None)
    assert RpcMethods([module(add=add), module(imported=add)]).takes_long("add") is False
    with pytest.raises(ConfigurationError, match="two RPC methods are named 'add'"):
        RpcMethods([module(add=add), module(other=other)])


def test_modules_of_the_operator_are_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("rpc_good", "rpc_empty", "rpc_broken")
    (tmp_path / "rpc_good.py").write_text(
        "from penstock.worker.engine.rpc import rpc_method\n\n"
        "@rpc_method('hello')\ndef hello(engine, name):\n    return f'hello {name}'\n"
    )
    (tmp_path / "rpc_empty.py").write_text("def hello(engine): ...\n")
    (tmp_path / "rpc_broken.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert RpcMethods(import_rpc_modules(names[:1])).run(ENGINE, "hello", ["you"], {}) == "hello you"
    with pytest.raises(ConfigurationError, match="rpc_empty has no function with @rpc_method"):
        import_rpc_modules(names[1:2])
    with pytest.raises(ConfigurationError, match="rpc_broken cannot be imported: ZeroDivisionError"):
        import_rpc_modules(names[2:])
    with pytest.raises(ConfigurationError, match="no_such_module_at_all cannot be imported"):
        import_rpc_modules(["no_such_module_at_all"])
    for name in names:
        sys.modules.pop(name, None)
