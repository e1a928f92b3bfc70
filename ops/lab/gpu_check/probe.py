"""``python -m penstock.ops.lab.gpu_check.probe``: prints versions and devices of this machine as JSON.

A separate program, so that the command that runs the parts loads no torch and uses no device.
"""

from __future__ import annotations

import importlib.util
import json
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from typing import Any

# Of the engine, and the rival.
NEEDED = ("torch", "triton", "transformers", "msgspec", "redis", "structlog", "psutil", "tokenizers")
# Of tests.
TESTS_NEED = ("pytest", "pytest_asyncio", "pytest_timeout", "hypothesis", "blockbuster", "rich", "prometheus_client")


def probe() -> dict[str, Any]:
    """Names and versions; ``missing`` are packages that cannot be imported."""
    missing = [name for name in (*NEEDED, *TESTS_NEED) if importlib.util.find_spec(name) is None]
    facts: dict[str, Any] = {
        "device": None,
        "num_devices": 0,
        "driver": None,
        "cuda": None,
        "python": platform.python_version(),
        "processor": platform.processor() or platform.machine(),
        "versions": {name: _version(name) for name in (*NEEDED, *TESTS_NEED) if name not in missing},
        "missing": missing,
    }
    if "torch" not in missing:
        import torch

        facts["cuda"] = torch.version.cuda
        if torch.cuda.is_available():
            facts["device"] = torch.cuda.get_device_name()
            facts["num_devices"] = torch.cuda.device_count()
            facts["driver"] = _driver()
    return facts


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _driver() -> str | None:
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    query = [command, "--query-gpu=driver_version", "--format=csv,noheader"]
    completed = subprocess.run(query, capture_output=True, text=True, check=False, timeout=20)
    return completed.stdout.strip().splitlines()[0] if completed.returncode == 0 and completed.stdout.strip() else None


if __name__ == "__main__":
    print(json.dumps(probe()))
