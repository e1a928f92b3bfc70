"""Options: each can be given in three ways, which mean the same; who wins; what a wrong one is told."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.shared.command_line import Parser, UsageError
from penstock.shared.errors import ConfigurationError
from penstock.worker.config import EngineConfig
from penstock.worker.options.option import DeclaredOption
from penstock.worker.options.program import Program, default_words
from penstock.worker.options.readers import (
    Choice,
    Folder,
    Indices,
    Integer,
    Model,
    Number,
    Share,
    Size,
    Switch,
    SwitchOrText,
    Texts,
)
from penstock.worker.options.settings import Settings, read_settings
from penstock.worker.options.told import effective_config
from penstock.worker.programs import OFFLINE, PROGRAMS, START, HostOptions, guide_tables
from penstock.worker.worker_config import WorkerConfig

ROOT = Path(__file__).parents[2]

# By kind of value: words, the same in TOML, and what both mean.
SAMPLES: dict[type, tuple[str, str, Any]] = {
    Folder: ("/some/folder", '"/some/folder"', "/some/folder"),
    Model: ("org/model", '"org/model"', "org/model"),
    Switch: ("yes", "true", True),
    SwitchOrText: ("/a/socket", '"/a/socket"', "/a/socket"),
    Share: ("0.25", "0.25", 0.25),
    Size: ("1.5GiB", '"1.5GiB"', 3 << 29),
    Integer: ("7", "7", 7),
    Number: ("2.5", "2.5", 2.5),
    Texts: ("one,two", '["one", "two"]', ("one", "two")),
    Indices: ("2,0", "[2, 0]", (2, 0)),
}
EVERY = [pytest.param(p, option, id=f"{p.name.split('.')[-1]}-{option.name}") for p in PROGRAMS for option in p.options]


def sample(option: DeclaredOption) -> tuple[str, str, Any]:
    reader = option.option.reader
    if isinstance(reader, Choice):
        other = next(value for value in reader.values if value != option.default)
        return other, f'"{other}"', other
    if type(reader) is Switch and option.default is True:
        return "no", "false", False
    return next((SAMPLES[kind] for kind in type(reader).__mro__ if kind in SAMPLES), ("text", '"text"', "text"))


def read(
    program: Program, *words: str, environment: dict[str, str] | None = None, file: Path | None = None
) -> Settings:
    parser = Parser()
    program.add_arguments(parser)
    config = ("--config", str(file)) if file else ()
    return read_settings(program, PROGRAMS, parser.parse_args([*words, *config]), environment or {})


def value(settings: Settings, name: str) -> Any:
    return next(setting.value for setting in settings.all if setting.declared.name == name)


def source(settings: Settings, name: str) -> str:
    return next(setting.source for setting in settings.all if setting.declared.name == name)


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "penstock.toml"
        path.write_text(text)
        return path

    return write


def words_of(option: DeclaredOption, words: str) -> list[str]:
    if type(option.option.reader) is Switch:
        return [option.flag if words == "yes" else f"--no-{option.flag.removeprefix('--')}"]
    return [option.flag, words]


@pytest.mark.parametrize(("program", "option"), EVERY)
def test_every_option_can_be_given_in_three_ways(
    program: Program, option: DeclaredOption, write: Callable[[str], Path]
) -> None:
    words, toml, meant = sample(option)
    assert meant != option.default
    assert value(read(program, *words_of(option, words)), option.name) == meant
    assert value(read(program, environment={option.variable: words}), option.name) == meant
    assert value(read(program, file=write(f"{option.name} = {toml}")), option.name) == meant
    assert value(read(program, environment={option.variable: ""}), option.name) == option.default


@pytest.mark.parametrize(("program", "option"), EVERY)
def test_the_command_line_wins_over_the_environment_and_that_over_a_file(
    program: Program, option: DeclaredOption, write: Callable[[str], Path]
) -> None:
    words, toml, meant = sample(option)
    other = "other" if option.is_required else "none" if option.may_be_none else default_words(option)
    file = write(f"{option.name} = {toml}")
    in_environment = read(program, environment={option.variable: other}, file=file)
    assert source(in_environment, option.name) == option.variable
    assert value(in_environment, option.name) != meant
    given = read(program, *words_of(option, words), environment={option.variable: other}, file=file)
    assert (value(given, option.name), source(given, option.name)) == (meant, option.flag)
    assert source(read(program, file=file), option.name) == f"{option.name} in {file}"
    assert source(read(program), option.name) == ""


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_none_takes_back_what_a_lower_source_gives(program: Program, write: Callable[[str], Path]) -> None:
    for option in program.options:
        if option.may_be_none:
            file = write(f"{option.name} = {sample(option)[1]}")
            assert value(read(program, option.flag, "none", file=file), option.name) == option.default
            assert value(read(program, file=write(f'{option.name} = "none"')), option.name) == option.default


def test_a_configuration_is_the_same_however_it_was_given(write: Callable[[str], Path]) -> None:
    words, lines, environment = [], [], {}
    for option in START.options:
        if option.struct is EngineConfig and option.name != "device":
            words += words_of(option, sample(option)[0])
            lines.append(f"{option.name} = {sample(option)[1]}")
            environment[option.variable] = sample(option)[0]
    chosen = {"device": "cuda", "max_num_batched_tokens": 64}

    def config(settings: Settings) -> EngineConfig:
        return EngineConfig(**{**settings.fields_of(EngineConfig), **chosen, "attention_backend": "triton"})

    given = config(read(START, *words))
    assert given == config(read(START, environment=environment)) == config(read(START, file=write("\n".join(lines))))
    assert given.num_threads == 7
    assert given.rpc_modules == ("one", "two")


@pytest.mark.parametrize("kind", ["words", "lists"])
def test_an_option_may_be_given_several_times(kind: str, write: Callable[[str], Path]) -> None:
    words = ("--rpc-module", "a", "--rpc-module", "b") if kind == "words" else ("--rpc-module", "a,b")
    settings = read(START, *words, file=write('rpc_module = "c"'))
    assert value(settings, "rpc_module") == ("a", "b")


@pytest.mark.parametrize(
    ("words", "meant"), [(["--fork-server"], True), (["--no-fork-server"], False), (["--fork-server", "/s"], "/s")]
)
def test_the_fork_server_is_a_switch_or_a_socket(words: list[str], meant: object) -> None:
    assert value(read(START, *words), "fork_server") is meant or value(read(START, *words), "fork_server") == meant
    assert read(START, *words).make(HostOptions).fork_server == meant


@pytest.mark.parametrize(
    ("words", "meant"), [("1", True), ("On", True), ("TRUE", True), ("0", False), ("no", False), ("off", False)]
)
def test_a_switch_in_words(words: str, meant: bool) -> None:
    assert value(read(START, environment={"PENSTOCK_DETERMINISTIC": words}), "deterministic") is meant


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("2GiB", 2 << 30), ("512m", 512 << 20), ("1.5 GB", 1_500_000_000), ("100", 100), ("100B", 100), ("1KiB", 1024)],
)
def test_a_size_in_words(text: str, num_bytes: int, write: Callable[[str], Path]) -> None:
    assert value(read(START, "--kv-cache-memory", text), "kv_cache_memory") == num_bytes
    assert value(read(START, file=write(f"kv_cache_memory = {num_bytes}")), "kv_cache_memory") == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1 PiB", "0", "two", "9" * 400])
def test_a_size_that_is_none(text: str) -> None:
    with pytest.raises(UsageError, match="--kv-cache-memory must be"):
        read(START, f"--kv-cache-memory={text}")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--max-num-seqs", "0"], "--max-num-seqs must be at least 1, got 0"),
        (["--max-num-seqs", "many"], "--max-num-seqs must be a whole number, got 'many'"),
        (["--max-num-seqs", "9" * 5000], "--max-num-seqs must be"),
        (["--threads", "-1"], "--threads must be at least 0, got -1; 0 chooses"),
        (["--lease-ttl", "nan"], "--lease-ttl must be at least 0.1, got nan"),
        (["--drain-timeout", "inf"], "--drain-timeout must be at most 1,000,000,000, got inf"),
        (["--gpu-memory-utilization", "1.5"], "--gpu-memory-utilization must be in (0, 1], got 1.5"),
        (["--kv-cache-memory", "lots"], "--kv-cache-memory must be a size such as 2GiB or 512MiB, got 'lots'"),
        (["--gpus", "one"], "--gpus must be indices such as 0,1, got 'one'"),
        (["--gpus", "0,0"], "--gpus must name each once, got (0, 0)"),
        (["--engines", "0"], "--engines must be at least 1, got 0"),
        (["--engines", "9999"], "--engines must be at most 1,024, got 9999"),
        (["--device", "cdua"], "--device must be one of cpu, cuda, got 'cdua'; did you mean cuda?"),
        (["--quantization", "w4"], "--quantization must be one of int8, fp8, got 'w4'"),
    ],
)
def test_a_wrong_value_of_the_command_line(words: list[str], sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        read(START, *words)
    assert str(caught.value).startswith(sentence)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("name", "words", "sentence"),
    [
        ("BLOCK_SIZE", "0", "PENSTOCK_BLOCK_SIZE must be at least 1, got 0"),
        ("DETERMINISTIC", "perhaps", "PENSTOCK_DETERMINISTIC must be yes or no (1, true, 0, false), got 'perhaps'"),
        ("LOG_LEVEL", "inof", "PENSTOCK_LOG_LEVEL must be one of debug, info, warning, error, critical, got 'inof'"),
        ("LEASE_TTL", "3s", "PENSTOCK_LEASE_TTL must be a number, got '3s'"),
    ],
)
def test_a_wrong_value_of_the_environment(name: str, words: str, sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        read(START, environment={f"PENSTOCK_{name}": words})
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("max_num_seqs = 0", "max_num_seqs in {} must be at least 1, got 0"),
        ('max_num_seqs = "8"', "max_num_seqs in {} must be a whole number, without quotes, got '8'"),
        ("max_num_seqs = true", "max_num_seqs in {} must be a whole number, without quotes, got True"),
        ("max_num_seqs = 2.0", "max_num_seqs in {} must be a whole number, without quotes, got 2.0"),
        (f"lease_ttl = {10**400}", "lease_ttl in {} must be at most 1,000,000,000, got"),
        ('lease_ttl = "3"', "lease_ttl in {} must be a number, without quotes, got '3'"),
        ('deterministic = "yes"', "deterministic in {} must be true or false, without quotes, got 'yes'"),
        ("kv_cache_memory = 1.5", 'kv_cache_memory in {} must be a size such as "2GiB", or a number of bytes, got 1.5'),
        ("model = 3", "model in {} must be a string, got 3"),
        ("rpc_module = [1]", "rpc_module in {} must be a list of strings, got [1]"),
        ("gpus = [-1]", "gpus in {} must be a list of indices such as [0, 1], got [-1]"),
        ("gpus = []", "gpus in {} must be a list of indices such as [0, 1], got []"),
        ('dtype = "bfloat"', "dtype in {} must be one of auto, float32, bfloat16, float16, got 'bfloat'; did you mean"),
        ("max_nun_seqs = 8", "unknown key max_nun_seqs in {}; did you mean max_num_seqs?"),
        ("max-num-seqs = 8", "unknown key max-num-seqs in {}; did you mean max_num_seqs?"),
        ("zzz = 8", "unknown key zzz in {}; ops/guide/configuration.md has all keys"),
        ("[lease]\nttl = 3", "unknown key lease in {}"),
        ("config = 'x'", "unknown key config in {}"),
        ("max_num_seqs 8", "--config {} is no TOML file: "),
    ],
)
def test_a_wrong_file(text: str, sentence: str, write: Callable[[str], Path]) -> None:
    file = write(text)
    with pytest.raises(UsageError) as caught:
        read(START, file=file)
    assert str(caught.value).startswith(sentence.format(file))
    assert "\n" not in str(caught.value)


def test_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file or directory"):
        read(START, file=tmp_path / "nowhere.toml")
    (tmp_path / "latin").write_bytes(b'model = "\xe9"')
    with pytest.raises(UsageError, match="is no TOML file"):
        read(START, environment={"PENSTOCK_CONFIG": str(tmp_path / "latin")})


def test_the_file_may_be_named_by_the_environment(write: Callable[[str], Path], tmp_path: Path) -> None:
    environment = {"PENSTOCK_CONFIG": str(write("block_size = 8"))}
    assert value(read(START, environment=environment), "block_size") == 8
    other = tmp_path / "other.toml"
    other.write_text("block_size = 4")
    assert value(read(START, environment=environment, file=other), "block_size") == 4


def test_what_is_overridden_is_checked_all_the_same(write: Callable[[str], Path]) -> None:
    with pytest.raises(UsageError, match=r"block_size in .* must be at least 1"):
        read(START, "--block-size", "8", file=write("block_size = 0"))


def test_one_file_serves_both_programs(write: Callable[[str], Path]) -> None:
    file = write('redis_url = "redis://here"\nworkload = "w.json"\nblock_size = 8')
    assert [value(read(program, file=file), "block_size") for program in PROGRAMS] == [8, 8]


def test_an_unknown_variable_is_nobodys() -> None:
    assert source(read(START, environment={"PENSTOCK_DATA_DIR": "x", "PENSTOCK_ZZZ": "1"}), "block_size") == ""


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_what_has_to_be_given(program: Program) -> None:
    missing = next(option for option in program.options if option.is_required)
    with pytest.raises(UsageError, match=rf"^{missing.flag} is missing; .*{missing.variable}.*{missing.name} in a"):
        read(program).require()


def test_a_contradiction_names_where_its_parts_come_from(write: Callable[[str], Path]) -> None:
    file = write('model = "m"\nmax_num_seqs = 64\nblock_size = 8')
    settings = read(OFFLINE, "--max-num-batched-tokens", "8", file=file, environment={"PENSTOCK_DTYPE": "float32"})
    with pytest.raises(ConfigurationError, match=r"at least max_num_seqs \(64\)") as caught, settings.naming_sources():
        settings.make(EngineConfig)
    assert str(caught.value).endswith(f"(given: max_num_seqs in {file})")


def test_what_is_in_effect_is_a_file_again(write: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    settings = read(
        START,
        *("--model", 'a "quoted" \\ name', "--gpus", "0,1", "--kv-cache-memory", "2GiB", "--rpc-module", "a"),
        environment={"PENSTOCK_DTYPE": "float16", "PENSTOCK_REDIS_URL": "redis://:secret@host"},
        file=write("log_requests = false"),
    )
    shown = effective_config(settings)
    assert "secret" not in shown
    for part in ("--gpus", "PENSTOCK_DTYPE", "log_requests in ", "default"):
        assert f"# {part}" in shown
    again = read(START, file=write(shown))
    names = {option.name for option in START.options} - {"redis_url"}
    assert {name: value(again, name) for name in names} == {name: value(settings, name) for name in names}
    assert "# model has to be given\n" in effective_config(read(START))


def test_a_secret_is_not_told_when_it_is_wrong(write: Callable[[str], Path]) -> None:
    with pytest.raises(UsageError, match="must be a string, got 'list'"):
        read(START, file=write('redis_url = ["redis://:secret@host"]'))


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
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert "max_num_seqs = 9 " in done.stdout


def test_the_guide_has_all_options_as_they_are_declared() -> None:
    page = (ROOT / "ops" / "guide" / "configuration.md").read_text()
    made = page.partition("-->\n")[2].partition("<!-- end -->")[0].strip()
    assert made == guide_tables().strip(), "put in what python -m penstock.worker.programs prints"


def test_options_that_documents_name_exist() -> None:
    flags = {option.flag for option in START.options} | {"--config", "--show-config"}
    flags |= {f"--no-{flag[2:]}" for flag in flags}
    pages = [ROOT / "README.md", *(ROOT / "ops" / "guide").glob("*.md")]
    calls = [call for page in pages for call in re.findall(r"worker start ([^`|\n]*)", page.read_text())]
    calls.append((ROOT / "ops" / "guide" / "models.md").read_text())
    named = {flag for call in calls for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", call)}
    assert named - flags == set()
    assert {"--model", "--quantization", "--deterministic"} <= named
