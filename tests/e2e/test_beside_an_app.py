"""Installed next to an app that owns folders named shared/, worker/, kernels/ and producer/."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMES = ("shared", "worker", "kernels", "producer", "ops")

APP = """
import asyncio, sys
import shared, worker, kernels, producer, ops
assert all(m.OWNER == "the app" for m in (shared, worker, kernels, producer, ops))
import penstock.producer
from penstock.producer import Client, SamplingParams
assert "site" in penstock.producer.__file__, penstock.producer.__file__

async def main():
    async with Client.connect(sys.argv[1], model="m", wait_for_model=True, namespace=sys.argv[2]) as client:
        handle = await client.submit("hi", SamplingParams(max_tokens=3))
        await handle.cancel()
        print((await handle.result()).outputs[0].finish_reason)

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from this checkout and unpacked as pip would. No test changes it."""
    folder = tmp_path_factory.mktemp("installed")
    wheels, site = folder / "wheels", folder / "site"
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(wheels), str(_clean_copy(folder))]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = wheels.iterdir()
    # Not compiled, as most of it is not imported here.
    install = [*pip, "install", "--no-deps", "--no-compile", "--target", str(site), str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    return site


def test_the_client_works_next_to_folders_of_the_same_names(installed: Path, tmp_path: Path, redis_url, namespace):
    app = tmp_path / "app"
    for name in NAMES:
        (app / name).mkdir(parents=True)
        (app / name / "__init__.py").write_text('OWNER = "the app"\n')
    (app / "main.py").write_text(APP)
    # -S leaves out site-packages and with it this checkout's own editable install; the libraries are added by hand.
    libraries = sysconfig.get_path("purelib")
    prologue = f"import sys; sys.path[:0] = [{str(app)!r}, {str(installed)!r}]; sys.path.append({libraries!r})"
    script = f"exec(open({str(app / 'main.py')!r}).read())"
    code = f"{prologue}; sys.argv = ['main.py', {redis_url!r}, {namespace!r}]; {script}"
    result = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, cwd=app, check=False)
    assert result.stdout.strip() == "cancelled", result.stderr


def test_the_wheel_adds_one_name_only(installed: Path) -> None:
    names = {path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")}
    assert names <= {"penstock", "bin"}
    assert (installed / "penstock" / "shared" / "broker" / "scripts" / "engines" / "claim.lua").is_file()
    assert (installed / "penstock" / "ops" / "demo" / "model" / "model.safetensors").is_file()
    assert (installed / "penstock" / "producer" / "py.typed").is_file()


def _clean_copy(folder: Path) -> Path:
    """The files git knows, so that a build leaves nothing in the checkout."""
    copy = folder / "source"
    names = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True)
    for name in names.stdout.decode().splitlines():
        target = copy / name
        if (ROOT / name).is_file() and not name.startswith("tests/"):
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    return copy
