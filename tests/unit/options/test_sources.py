"""Options: each can be given in three ways, which mean the same; who wins; how they are shown."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.config.worker_config import WorkerConfig
from penstock.worker.options.option import DeclaredOption
from penstock.worker.options.program import Program, default_words
from penstock.worker.options.readers import Switch
from penstock.worker.options.settings import Settings, effective_config
from penstock.worker.programs import OFFLINE, PROGRAMS, START, HostOptions, guide_tables

from ...processes import DEADLINE_S
from .harness import EVERY, ROOT, read, sample, source, value, words_of


@pytest.mark.parametrize(("program", "option"), EVERY)
def test_every_option_can_be_set_in_three_ways(
    program: Program, option: DeclaredOption, write: Callable[[str], Path]
) -> None:
    words, toml, expected = sample(option)
    assert expected != option.default
    assert value(read(program, *words_of(option, words)), option.name) == expected
    assert value(read(program, environment={option.variable: words}), option.name) == expected
    assert value(read(program, file=write(f"{option.name} = {toml}")), option.name) == expected
    assert value(read(program, environment={option.variable: ""}), option.name) == option.default


@pytest.mark.parametrize(("program", "option"), EVERY)
def test_the_command_line_wins_over_the_environment_and_that_over_a_file(
    program: Program, option: DeclaredOption, write: Callable[[str], Path]
) -> None:
    words, toml, expected = sample(option)
    other = "other" if option.is_required else "none" if option.may_be_none else default_words(option)
    file = write(f"{option.name} = {toml}")
    in_environment = read(program, environment={option.variable: other}, file=file)
    assert source(in_environment, option.name) == option.variable
    assert value(in_environment, option.name) != expected
    parsed = read(program, *words_of(option, words), environment={option.variable: other}, file=file)
    assert (value(parsed, option.name), source(parsed, option.name)) == (expected, option.flag)
    assert source(read(program, file=file), option.name) == f"{option.name} in {file}"
    assert source(read(program), option.name) == ""


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_none_resets_the_value_of_a_lower_source(program: Program, write: Callable[[str], Path]) -> None:
    for option in program.options:
        if option.may_be_none:
            file = write(f"{option.name} = {sample(option)[1]}")
            if not isinstance(option.option.reader, Switch):  # which takes no value on the command line
                assert value(read(program, option.flag, "none", file=file), option.name) == option.default
            assert value(read(program, file=write(f'{option.name} = "none"')), option.name) == option.default


def test_all_sources_give_the_same_configuration(write: Callable[[str], Path]) -> None:
    words, lines, environment = [], [], {}
    for option in START.options:
        if option.struct is EngineConfig and option.name != "device":
            words += words_of(option, sample(option)[0])
            lines.append(f"{option.name} = {sample(option)[1]}")
            environment[option.variable] = sample(option)[0]
    # The last ones are other engines' than the sample of `engine`.
    of_others = {"engine_url": "", "engine_command": "", "speculative": "off", "enable_lora": False}
    of_others |= {"executor": "", "nnodes": 1, "node_rank": 0, "master_addr": ""}
    # Neither goes with that of `enable_prefix_caching`.
    of_others |= {"kv_offload_memory": None, "kv_offload_dir": ""}
    # Nor these with those of `deterministic` and others.
    of_others |= {"data_parallel_size": 1, "data_parallel_group": "", "data_parallel_address": ""}
    chosen = {"device": "cuda", "max_num_batched_tokens": 64, **of_others}

    def config(settings: Settings) -> EngineConfig:
        return EngineConfig(**{**settings.fields_of(EngineConfig), **chosen, "attention_backend": "triton"})

    parsed = config(read(START, *words))
    assert parsed == config(read(START, environment=environment)) == config(read(START, file=write("\n".join(lines))))
    assert parsed.num_threads == 7
    assert parsed.rpc_modules == ("one", "two")


@pytest.mark.parametrize("kind", ["words", "lists"])
def test_an_option_may_be_repeated(kind: str, write: Callable[[str], Path]) -> None:
    words = ("--rpc-module", "a", "--rpc-module", "b") if kind == "words" else ("--rpc-module", "a,b")
    settings = read(START, *words, file=write('rpc_module = "c"'))
    assert value(settings, "rpc_module") == ("a", "b")


@pytest.mark.parametrize(
    ("words", "expected"), [(["--fork-server"], True), (["--no-fork-server"], False), (["--fork-server", "/s"], "/s")]
)
def test_the_fork_server_is_a_switch_or_a_socket(words: list[str], expected: object) -> None:
    assert (
        value(read(START, *words), "fork_server") is expected or value(read(START, *words), "fork_server") == expected
    )
    assert read(START, *words).make(HostOptions).fork_server == expected


@pytest.mark.parametrize(
    ("words", "expected"), [("1", True), ("On", True), ("TRUE", True), ("0", False), ("no", False), ("off", False)]
)
def test_a_switch_in_words(words: str, expected: bool) -> None:
    assert value(read(START, environment={"PENSTOCK_DETERMINISTIC": words}), "deterministic") is expected


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("2GiB", 2 << 30), ("512m", 512 << 20), ("1.5 GB", 1_500_000_000), ("100", 100), ("100B", 100), ("1KiB", 1024)],
)
def test_a_size_in_words(text: str, num_bytes: int, write: Callable[[str], Path]) -> None:
    assert value(read(START, "--kv-cache-memory", text), "kv_cache_memory") == num_bytes
    assert value(read(START, file=write(f"kv_cache_memory = {num_bytes}")), "kv_cache_memory") == num_bytes


def test_the_file_may_be_named_by_the_environment(write: Callable[[str], Path], tmp_path: Path) -> None:
    environment = {"PENSTOCK_CONFIG": str(write("block_size = 8"))}
    assert value(read(START, environment=environment), "block_size") == 8
    other = tmp_path / "other.toml"
    other.write_text("block_size = 4")
    assert value(read(START, environment=environment, file=other), "block_size") == 4


def test_one_file_serves_both_programs(write: Callable[[str], Path]) -> None:
    file = write('redis_url = "redis://here"\nworkload = "w.json"\nblock_size = 8')
    assert [value(read(program, file=file), "block_size") for program in PROGRAMS] == [8, 8]


def test_the_effective_configuration_can_be_read_as_a_file(
    write: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    settings = read(
        START,
        "--model",
        'a "quoted" \\ name',
        "--gpus",
        "0,1",
        "--kv-cache-memory",
        "2GiB",
        "--rpc-module",
        "a",
        environment={"PENSTOCK_DTYPE": "float16", "PENSTOCK_REDIS_URL": "redis://:secret@host"},
        file=write("log_requests = false"),
    )
    effective = effective_config(settings)
    assert "secret" not in effective
    for part in ("--gpus", "PENSTOCK_DTYPE", "log_requests in ", "default"):
        assert f"# {part}" in effective
    again = read(START, file=write(effective))
    names = {option.name for option in START.options} - {"redis_url"}
    assert {name: value(again, name) for name in names} == {name: value(settings, name) for name in names}
    assert "# model is required\n" in effective_config(read(START))


def test_no_two_options_share_a_name() -> None:
    for program in PROGRAMS:
        names = [option.name for option in program.options]
        assert len(names) == len(set(names))
    shared = {option.name: option.option for option in START.options if option.struct is WorkerConfig}
    assert not shared.keys() & {option.name for option in OFFLINE.options}


@pytest.mark.parametrize("command", [["penstock.worker.cli", "start"], ["penstock.worker.engine.offline"]])
def test_programs_show_it_and_load_no_torch(command: list[str], write: Callable[[str], Path]) -> None:
    code = (
        "import runpy, sys; sys.argv = sys.argv[1:]\n"
        "try: runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=False)\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    words = [*command, "--config", str(write("max_num_seqs = 9")), "--show-config"]
    result = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=False, timeout=DEADLINE_S
    )
    assert result.returncode == 0, result.stderr
    assert "max_num_seqs = 9 " in result.stdout


def test_the_tables_of_the_site_have_all_options() -> None:
    rows = re.findall(r"(?m)^\| `(--[\w-]+)` \| `(PENSTOCK_\w+)` \|", guide_tables())
    assert {flag for flag, _ in rows} >= {option.flag for option in START.options}


def test_options_that_documents_name_exist() -> None:
    flags = {option.flag for option in START.options} | {"--config", "--show-config"}
    flags |= {f"--no-{flag[2:]}" for flag in flags}
    pages = [ROOT / "README.md", *(ROOT / "ops" / "guide").glob("**/*.md")]
    calls = [call for page in pages for call in re.findall(r"worker start ([^`|\n]*)", page.read_text())]
    sections = (ROOT / "ops" / "guide" / "serving" / "models.md").read_text().split("\n## ")
    calls += [section for section in sections if "penstock quality" not in section]
    named = {flag for call in calls for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", call)}
    assert named - flags == set()
    assert {"--model", "--quantization", "--deterministic"} <= named
