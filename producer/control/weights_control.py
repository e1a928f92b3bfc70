"""What a client may ask of the weights that engines serve."""

from __future__ import annotations

from typing import Unpack

import msgspec

from ...shared.control.sleeping import IsSleeping, SleepState
from ...shared.control.weights import ReloadWeights, WeightsReloaded
from ...shared.errors import EngineCallError, PenstockError
from ...shared.values.timeouts import check_timeout
from ..client_core import ClientCore
from ..engine_calls import CallOptions
from ..inputs.options import check_flag

# Reading a model takes longer than most calls.
RELOAD_TIMEOUT_S = 600.0


class WeightsControl(ClientCore):
    """The part of the client that is about weights. Its methods raise what those of ``EngineControl`` do."""

    async def reload_weights(
        self,
        path: str | None = None,
        *,
        version: str = "",
        mode: str = "wait",
        drain_timeout_s: float = 30.0,
        only_check: bool = False,
        **options: Unpack[CallOptions],
    ) -> dict[str, WeightsReloaded]:
        """Let engines serve the weights of another folder: one after the other, while the others serve.

        All look at the folder first, and if one of them refuses it, none changes. The engine whose turn it is claims
        nothing until it serves again; what waits goes to others, or waits for it. If one fails, it serves its former
        weights, and those after it were not asked; the error's ``answers`` are those that have changed. Calling again
        goes over all of them once more.

        An engine that dies begins its next life with the weights that it served. One that is started anew begins with
        those of its command line.

        Args:
            path: absolute, on every engine's host, of a model of the same architecture, shapes and tokenizer; None
                reads the folder again that the engine's weights came from.
            version: what answers and heartbeats call the weights; a digest of them by default.
            mode: of requests that run: "wait" lets them end on the weights that they began with, and changes nothing if
                they have not within ``drain_timeout_s``; "keep" queues them again, to go on after their last token, on
                the new weights here or on what another engine has (the delta with which they go on says which);
                "abort" ends them with finish_reason "abort".
            only_check: look at the folder, and change nothing.
            options: ``timeout_s``, 600 here, is that of each engine.
        """
        call = ReloadWeights(
            path=path,
            version=version,
            mode=mode,
            drain_timeout_s=drain_timeout_s,
            only_check=check_flag("only_check", only_check),
        )
        timeout_s = options.get("timeout_s", RELOAD_TIMEOUT_S)
        check_timeout("timeout_s", timeout_s)
        options["timeout_s"] = timeout_s + (drain_timeout_s if mode == "wait" else 0.0)
        target = options.get("engine_id") or options.get("model") or "all engines"
        told = {"path": path or "", "version": version, "mode": mode}
        checking = msgspec.structs.replace(call, only_check=True)
        if only_check:
            return await self._call_engines(checking, WeightsReloaded, options)
        model = options.get("model") or ""
        async with self._operations.audit.audited("engine.reload_weights", target, model=model, **told):
            answers: dict[str, WeightsReloaded] = {}
            waiting = sorted(await self._call_engines(checking, WeightsReloaded, options))
            while waiting:
                await self._roll(call, waiting, options, answers)
                if options.get("engine_id") is not None:
                    break
                # Some may have begun meanwhile, with what their command lines say.
                waiting = sorted((await self._call_engines(IsSleeping(), SleepState, options)).keys() - answers.keys())
            return answers

    async def _roll(
        self, call: ReloadWeights, engine_ids: list[str], options: CallOptions, answers: dict[str, WeightsReloaded]
    ) -> None:
        """Ask one after the other, and add to ``answers``."""
        for place, engine_id in enumerate(engine_ids):
            of_one: CallOptions = {**options, "engine_id": engine_id}
            try:
                answers |= await self._call_engines(call, WeightsReloaded, of_one)
            except PenstockError as error:
                # One that has died since it was asked first has no answer of its own.
                errors = error.errors if isinstance(error, EngineCallError) else {engine_id: error}
                left = ", ".join(engine_ids[place + 1 :]) or "none"
                raise EngineCallError(
                    f"{error}; changed before: {', '.join(answers) or 'none'}; not asked: {left}",
                    answers=dict(answers),
                    errors=errors,
                ) from error
