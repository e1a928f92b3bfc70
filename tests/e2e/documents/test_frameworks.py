"""The pages on LangChain and LlamaIndex, as scripts; skipped where their packages are not installed."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.ops.local.server import LocalGateway

from .test_guide import BLOCK, GUIDE, PACKAGES, checked

pytestmark = pytest.mark.xdist_group("deployment")


@pytest.mark.parametrize("page", PACKAGES)
def test_the_script_of_a_page_gives_the_stated_results(page: str, gateway: LocalGateway, tmp_path: Path) -> None:
    if importlib.util.find_spec(PACKAGES[page]) is None:
        pytest.skip(f"pip install {PACKAGES[page].replace('_', '-')}")
    blocks = BLOCK.findall((GUIDE / "howto" / f"{page}.md").read_text())
    lines = [checked(line) for block in blocks for line in block.splitlines()]
    script = tmp_path / "page.py"
    script.write_text("\n".join(lines).replace("http://localhost:8000/v1", gateway.base_url))
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
