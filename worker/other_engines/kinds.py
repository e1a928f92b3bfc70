"""What is to be known of an engine before it is started: what its worker process needs, and what its options allow."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

from ...shared.errors import ConfigurationError
from ..config.engine_config import EngineConfig
from .http.options import check_options as check_http_options
from .vllm.options import check_options as check_vllm_options

# Python itself, and the metadata of what is installed.
_LOOK_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class EngineKind:
    """One of ``--engine``.

    Args:
        libraries: that the environment of ``worker start`` must have, and ``extra`` of penstock that brings them.
        has_ranks: whether it may compute on several GPUs.
        can_fork: whether a fork server that has imported torch may start its core.
        device: where it counts as being, if none is named; None: wherever there is a GPU.
        check: raises ``ConfigurationError`` where it cannot be started as configured.
    """

    libraries: tuple[str, ...]
    can_fork: bool
    has_ranks: bool
    check: Callable[[EngineConfig], None]
    extra: str = "worker"
    device: str | None = None


def _check_nothing(_: EngineConfig) -> None:
    """``EngineConfig`` has checked it."""


def _check_vllm(config: EngineConfig) -> None:
    check_vllm_options(config)
    python = config.engine_python or sys.executable
    command = [python, "-m", "penstock.worker.other_engines.vllm.versions"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=_LOOK_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigurationError(f"engine_python {python} cannot be run: {error}") from error
    if found.returncode == 0:
        return
    words = found.stderr.strip().splitlines() or [f"it ended with {found.returncode}"]
    if "No module named" in words[-1]:
        raise ConfigurationError(
            f"engine_python {python} lacks what a core needs: {words[-1]}; run `{python} -m pip install penstock`"
        )
    raise ConfigurationError(words[-1])


KINDS = {
    "penstock": EngineKind(
        libraries=("torch", "transformers", "psutil"), can_fork=True, has_ranks=True, check=_check_nothing
    ),
    "vllm": EngineKind(libraries=("tokenizers", "jinja2", "psutil"), can_fork=False, has_ranks=True, check=_check_vllm),
    "http": EngineKind(
        libraries=("tokenizers", "jinja2", "psutil", "httpx"),
        can_fork=False,
        has_ranks=False,
        check=check_http_options,
        extra="http",
        device="cpu",
    ),
}
