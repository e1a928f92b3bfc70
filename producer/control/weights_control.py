"""The client's calls that change the weights of engines."""

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
    """The part of the client for weights. Its methods raise the errors of ``EngineControl``."""

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
        """Have engines serve the weights of another folder, one engine after another, while the others serve.

        First all engines check the folder; if one refuses it, none changes. An engine that reloads claims nothing until
        it serves again; waiting requests go to other engines, or wait for it. If an engine fails, it serves its former
        weights, and the engines after it are not called; ``answers`` of the error are those that have changed. Calling
        again reloads all engines once more.

        An engine that restarts after a crash serves the weights that it served before. A new engine serves the weights
        of its command line.

        Args:
            path: absolute, on every engine's host, of a model of the same architecture, shapes and tokenizer; None
                reads again the folder from which the engine's weights came.
            version: name of the weights in answers and heartbeats; a digest of the weights by default.
            mode: of running requests: "wait" lets them end on their weights, and changes nothing if they have not ended
                within ``drain_timeout_s``; "keep" requeues them, to resume after their last token, on the new weights
                here or on those of another engine (the first delta after the resume says which); "abort" ends them with
                finish_reason "abort".
            only_check: check the folder, and change nothing.
            options: ``timeout_s``, 600 here, applies to each engine.
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
        details = {"path": path or "", "version": version, "mode": mode}
        checking = msgspec.structs.replace(call, only_check=True)
        if only_check:
            return await self._call_engines(checking, WeightsReloaded, options)
        model = options.get("model") or ""
        async with self._operations.audit.audited("engine.reload_weights", target, model=model, **details):
            answers: dict[str, WeightsReloaded] = {}
            waiting = sorted(await self._call_engines(checking, WeightsReloaded, options))
            while waiting:
                await self._reload_in_turn(call, waiting, options, answers)
                if options.get("engine_id") is not None:
                    break
                # Engines may have started meanwhile, with the weights of their command lines.
                waiting = sorted((await self._call_engines(IsSleeping(), SleepState, options)).keys() - answers.keys())
            return answers

    async def _reload_in_turn(
        self, call: ReloadWeights, engine_ids: list[str], options: CallOptions, answers: dict[str, WeightsReloaded]
    ) -> None:
        """Reload one engine after another, and add their answers to ``answers``."""
        for place, engine_id in enumerate(engine_ids):
            engine_options: CallOptions = {**options, "engine_id": engine_id}
            try:
                answers |= await self._call_engines(call, WeightsReloaded, engine_options)
            except PenstockError as error:
                # An engine that died after the check has no answer in the error.
                errors = error.errors if isinstance(error, EngineCallError) else {engine_id: error}
                left = ", ".join(engine_ids[place + 1 :]) or "none"
                raise EngineCallError(
                    f"{error}; changed before: {', '.join(answers) or 'none'}; not asked: {left}",
                    answers=dict(answers),
                    errors=errors,
                ) from error
