"""Properties of engines that are needed before the start: requirements of their worker process, checks of options."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

from ...shared.errors import ConfigurationError
from ...shared.values.distribution import install_command
from ..config.engine_config import EngineConfig
from .http.options import check_options as check_http_options
from .vllm.options import check_options as check_vllm_options

# Time to start Python and read the metadata of installed packages.
_VERSION_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class EngineKind:
    """Properties of a value of ``--engine``.

    Args:
        libraries: packages that the environment of ``worker start`` must have.
        extra: extra of penstock that installs them.
        has_ranks: whether it may compute on several GPUs.
        can_fork: whether a fork server that has imported torch may start its core.
        device: default device; None for a GPU if the host has one.
        check: raises ``ConfigurationError`` if the engine cannot be started with a configuration.
    """

    libraries: tuple[str, ...]
    can_fork: bool
    has_ranks: bool
    check: Callable[[EngineConfig], None]
    extra: str = "worker"
    device: str | None = None


def _check_nothing(_: EngineConfig) -> None:
    """Check nothing, since ``EngineConfig`` has checked the options."""


def _check_vllm(config: EngineConfig) -> None:
    check_vllm_options(config)
    python = config.engine_python or sys.executable
    command = [python, "-m", "penstock.worker.other_engines.vllm.versions"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_VERSION_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigurationError(f"engine_python {python} cannot be run: {error}") from error
    if result.returncode == 0:
        return
    lines = result.stderr.strip().splitlines() or [f"it ended with {result.returncode}"]
    if "No module named" in lines[-1]:
        raise ConfigurationError(
            f"engine_python {python} lacks a package that a core needs: {lines[-1]}; run "
            f"`{python} -m {install_command()}`"
        )
    raise ConfigurationError(lines[-1])


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
