"""Methods that can be called in the engine core by name: built-in ones, and those of ``--rpc-module``.

A method is a function with a decorator::

    from penstock.worker.engine.rpc import RpcEngine, rpc_method

    @rpc_method("count_layers")
    def count_layers(engine: RpcEngine) -> int:
        return len(list(engine.model.network.modules()))

It runs in the core's main thread between two steps, so the state does not change, and no step runs meanwhile.

An engine of several ranks runs it on all of them at the same time, each with its part of the model, so it may use the
model's collectives. The result is then a list in the order of ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import msgspec

from ...shared.errors import ConfigurationError, EngineCallError, ValidationError
from ...shared.process.plugins import RPC_MODULES, load_module
from ...shared.values.shown import shown

if TYPE_CHECKING:
    from ..config.engine_config import EngineConfig
    from ..models.attention.page_layout import PageLayout
    from ..models.loaded import LoadedModel
    from .core.engine_core import EngineCore

_MARK = "__penstock_rpc__"


class RpcEngine:
    """The engine that a method may read and change; the first argument of each method.

    Attributes:
        config: the engine's configuration.
        model: the model; with several ranks, the part of this rank.
        rank: number of this rank; 0 has the core.
        pages: on rank 0, how layers share the KV cache if some of them attend within a window; None for one block
            table.
    """

    def __init__(
        self,
        config: EngineConfig,
        core: EngineCore | None,
        model: LoadedModel,
        rank: int = 0,
        pages: PageLayout | None = None,
    ) -> None:
        self.config = config
        self.model = model
        self.rank = rank
        self.pages = pages
        self._core = core

    @property
    def core(self) -> EngineCore:
        """The engine core, with scheduler and requests.

        Raises:
            EngineCallError: this is a rank above 0.
        """
        if self._core is None:
            raise EngineCallError(
                f"engine.core is of rank 0 alone, and the method runs in all ranks; return before it "
                f"if engine.rank > 0 (here {self.rank})"
            )
        return self._core


@dataclass(frozen=True)
class RpcMethod:
    """A registered function."""

    name: str
    function: Callable[..., Any]
    takes_long: bool
    changes_model: bool = False


def rpc_method(
    name: str, *, takes_long: bool = False, changes_model: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function of a module under ``name``.

    Args:
        takes_long: it may take longer than ``--stall-timeout``. Without this flag such an engine is killed as hung.
        changes_model: it changes weights. If it fails in one of several ranks, the engine restarts with the weights of
            the files, since ranks with different weights would compute wrong results.
    """

    def mark(function: Callable[..., Any]) -> Callable[..., Any]:
        setattr(function, _MARK, RpcMethod(name, function, takes_long, changes_model))
        return function

    return mark


class RpcMethods:
    """The methods of an engine, by name. Only methods registered here can be called.

    Raises:
        ConfigurationError: two functions have one name.
    """

    def __init__(self, modules: Iterable[ModuleType]) -> None:
        self._methods: dict[str, RpcMethod] = {}
        for module in modules:
            for method in _marked(module):
                registered = self._methods.setdefault(method.name, method)
                if registered.function is not method.function:
                    raise ConfigurationError(
                        f"two RPC methods are named {shown(method.name)}; rename that of {module.__name__}"
                    )

    def takes_long(self, name: str) -> bool:
        method = self._methods.get(name)
        return method is not None and method.takes_long

    def check(self, name: str, args: list[Any], kwargs: dict[str, Any]) -> RpcMethod:
        """Return the method called ``name``.

        Raises:
            ValidationError: no method has this name; the message lists the registered ones.
            EngineCallError: it does not take these arguments.
        """
        method = self._methods.get(name)
        if method is None:
            raise ValidationError(
                f"no RPC method {shown(name)} is registered; available: {', '.join(sorted(self._methods))}"
            )
        try:
            inspect.signature(method.function).bind(None, *args, **kwargs)
        except TypeError as error:
            raise EngineCallError(f"RPC method {shown(name)} does not take these arguments: {error}") from error
        return method

    def run(self, engine: RpcEngine, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Run a method and return its result as plain data.

        Raises:
            ValidationError: as ``check``.
            EngineCallError: as ``check``, or the result is not plain data.
        """
        method = self.check(name, args, kwargs)
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
