"""Methods that may be called in the engine core by name: ours, and those of the modules that ``--rpc-module`` names.

A method is a function with a decorator::

    from penstock.worker.engine.rpc import RpcEngine, rpc_method

    @rpc_method("count_layers")
    def count_layers(engine: RpcEngine) -> int:
        return len(list(engine.model.network.modules()))

It runs in the core's own thread between two steps, so nothing changes under it, and no step is made meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import msgspec

from ...shared.errors import ConfigurationError, EngineCallError, ValidationError
from ...shared.plugins import RPC_MODULES, load_module
from ...shared.shown import shown

if TYPE_CHECKING:
    from ..config.engine_config import EngineConfig
    from ..models.loader import LoadedModel
    from .core import EngineCore

_MARK = "__penstock_rpc__"


@dataclass(frozen=True)
class RpcEngine:
    """What a method may look at and work on; the first argument of each."""

    config: EngineConfig
    core: EngineCore
    model: LoadedModel


@dataclass(frozen=True)
class RpcMethod:
    """A registered function."""

    name: str
    function: Callable[..., Any]
    takes_long: bool


def rpc_method(name: str, *, takes_long: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function of a module under ``name``.

    Args:
        takes_long: it may take longer than ``--stall-timeout``. An engine in which another does is killed as hung.
    """

    def mark(function: Callable[..., Any]) -> Callable[..., Any]:
        setattr(function, _MARK, RpcMethod(name, function, takes_long))
        return function

    return mark


class RpcMethods:
    """The methods of an engine, by name. No name is looked up anywhere but here.

    Raises:
        ConfigurationError: two functions have one name.
    """

    def __init__(self, modules: Iterable[ModuleType]) -> None:
        self._methods: dict[str, RpcMethod] = {}
        for module in modules:
            for method in _marked(module):
                known = self._methods.setdefault(method.name, method)
                if known.function is not method.function:
                    raise ConfigurationError(
                        f"two RPC methods are named {shown(method.name)}; rename that of {module.__name__}"
                    )

    def takes_long(self, name: str) -> bool:
        method = self._methods.get(name)
        return method is not None and method.takes_long

    def run(self, engine: RpcEngine, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Run a method and return its result as plain data.

        Raises:
            ValidationError: no method has this name; the message lists those there are.
            EngineCallError: the result is no plain data.
        """
        method = self._methods.get(name)
        if method is None:
            raise ValidationError(
                f"no RPC method {shown(name)} is registered; there are {', '.join(sorted(self._methods))}"
            )
        result = method.function(engine, *args, **kwargs)
        try:
            return msgspec.msgpack.decode(msgspec.msgpack.encode(result))
        except (TypeError, ValueError, OverflowError) as error:
            raise EngineCallError(f"the result of RPC method {shown(name)} cannot be sent: {error}") from error


def import_rpc_modules(names: Iterable[str]) -> list[ModuleType]:
    """Import the modules an operator has named.

    Raises:
        ConfigurationError: one cannot be imported, or registers nothing.
    """
    modules = []
    for name in names:
        module = load_module(RPC_MODULES, name)
        if not _marked(module):
            raise ConfigurationError(f"--rpc-module {name} has no function with @rpc_method")
        modules.append(module)
    return modules


def _marked(module: ModuleType) -> list[RpcMethod]:
    marks = (getattr(value, _MARK, None) for value in vars(module).values())
    return [mark for mark in marks if isinstance(mark, RpcMethod)]
