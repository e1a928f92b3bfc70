"""The libraries of the package ``penstock-kernels``: which one a processor uses, and a package of other sources."""

from __future__ import annotations

import json
import platform
import shutil
from importlib import invalidate_caches
from pathlib import Path

import pytest
import structlog

from penstock.kernels import native
from penstock.kernels.native import ahead
from penstock.kernels.native.build import PROCESSOR, sources_digest
from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.engine.setup.host import load_native_kernels

HASWELL = "fma movbe f16c abm bmi1 avx2 bmi2"
SKYLAKE = f"{HASWELL} avx512f avx512dq avx512cd avx512bw avx512vl"
ICE_LAKE = f"{SKYLAKE} avx512_vnni"
ZEN_4 = f"{ICE_LAKE} avx512_bf16"
SAPPHIRE_RAPIDS = f"{ZEN_4} amx_bf16 amx_tile amx_int8"
GRAVITON_2 = "fp asimd atomics asimddp"
GRAVITON_3 = f"{GRAVITON_2} bf16 i8mm"


@pytest.mark.parametrize(
    ("machine", "flags", "names"),
    [
        ("x86_64", "sse2 avx", []),
        ("x86_64", HASWELL, ["avx2"]),
        # Knights Landing has no vectors of bytes.
        ("x86_64", f"{HASWELL} avx512f avx512cd", ["avx2"]),
        ("x86_64", SKYLAKE, ["avx512", "avx2"]),
        ("x86_64", ICE_LAKE, ["avx512_vnni", "avx512", "avx2"]),
        ("x86_64", ZEN_4, ["avx512_bf16", "avx512_vnni", "avx512", "avx2"]),
        ("x86_64", SAPPHIRE_RAPIDS, ["amx", "avx512_bf16", "avx512_vnni", "avx512", "avx2"]),
        ("aarch64", GRAVITON_2, ["neon"]),
        ("aarch64", GRAVITON_3, ["neon_bf16", "neon"]),
        ("riscv64", "", []),
    ],
)
def test_instruction_sets_of_processors(machine: str, flags: str, names: list[str]) -> None:
    assert [each.name for each in ahead.usable_sets(machine, flags.split())] == names


@pytest.fixture
def package(compiled: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install a package with this machine's library for each instruction set, and return its folder."""
    library = native.loaded()
    assert library is not None
    folder = tmp_path / ahead.PACKAGE
    folder.mkdir()
    (folder / "__init__.py").touch()
    for each in ahead.INSTRUCTION_SETS:
        shutil.copy(library.path, folder / each.file)
    write_manifest(folder, sources_digest())
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv(PROCESSOR, raising=False)
    invalidate_caches()
    native.unload()
    return folder


def write_manifest(folder: Path, sources: str) -> None:
    (folder / ahead.MANIFEST).write_text(json.dumps({"version": "0.1.7", "sources": sources}))


def load_and_log() -> tuple[Path, list[structlog.typing.EventDict]]:
    with structlog.testing.capture_logs() as events:
        load_native_kernels(EngineConfig(model="m", device="cpu"))
    library = native.loaded()
    assert library is not None
    return library.path, events


def test_the_package_is_used_without_a_compiler(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    path, events = load_and_log()
    assert path.parent == package
    assert [(event["event"], event["library"]) for event in events] == [("native_kernels", str(path))]


def test_the_log_says_that_kernels_will_be_compiled(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not native.needs_compiling()
    write_manifest(package, "0" * 24)
    assert not native.needs_compiling()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    assert native.needs_compiling()
    monkeypatch.setattr(native, "load", lambda: "not in this test")
    with structlog.testing.capture_logs() as events:
        load_native_kernels(EngineConfig(model="m", device="cpu"))
    assert "native_kernels_compiling" in [event["event"] for event in events]
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert not native.needs_compiling()


def test_a_package_of_other_sources_is_ignored_with_a_remedy(package: Path) -> None:
    write_manifest(package, "0" * 24)
    path, events = load_and_log()
    assert path.parent != package
    (stale,) = [event for event in events if event["event"] == "kernels_package_stale"]
    assert stale["installed"] == "0.1.7"
    assert stale["remedy"].startswith("pip install penstock-kernels==")


def test_the_next_best_library_is_used_if_one_is_missing(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A processor with the instructions of several libraries; each is a copy of the one that runs here.
    flags = f"flags: {GRAVITON_3 if platform.machine() == 'aarch64' else SAPPHIRE_RAPIDS}"
    monkeypatch.setattr(ahead, "processor_flags", flags.encode)
    best = load_and_log()[0]
    best.unlink()
    native.unload()
    path, _ = load_and_log()
    assert path.parent == package
    assert path.name != best.name


def test_instructions_selected_by_the_environment_are_compiled(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PROCESSOR, "native")
    assert load_and_log()[0].parent != package
