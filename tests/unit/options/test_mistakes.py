"""The message about a wrong option: its source, the mistake, and the remedy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.shared.errors import ConfigurationError
from penstock.shared.process.command_line import UsageError
from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.options.program import Program
from penstock.worker.programs import OFFLINE, PROGRAMS, START

from .harness import read, source


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1 PiB", "0", "two", "9" * 400])
def test_an_invalid_size(text: str) -> None:
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
        (["--quantization", "w4"], "--quantization must be one of int8, int4-mixed, int4, fp8, got 'w4'"),
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
        ("zzz = 8", "unknown key zzz in {}; ops/guide/reference/configuration.md has all keys"),
        ("[lease]\nttl = 3", "unknown key lease in {}"),
        ("config = 'x'", "unknown key config in {}"),
        ("max_num_seqs 8", "--config {} is not a TOML file: "),
    ],
)
def test_a_wrong_file(text: str, sentence: str, write: Callable[[str], Path]) -> None:
    file = write(text)
    with pytest.raises(UsageError) as caught:
        read(START, file=file)
    assert str(caught.value).startswith(sentence.format(file))
    assert "\n" not in str(caught.value)


def test_an_invalid_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file or directory"):
        read(START, file=tmp_path / "nowhere.toml")
    (tmp_path / "latin").write_bytes(b'model = "\xe9"')
    with pytest.raises(UsageError, match="is not a TOML file"):
        read(START, environment={"PENSTOCK_CONFIG": str(tmp_path / "latin")})


def test_overridden_values_are_checked_too(write: Callable[[str], Path]) -> None:
    with pytest.raises(UsageError, match=r"block_size in .* must be at least 1"):
        read(START, "--block-size", "8", file=write("block_size = 0"))


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_required_options(program: Program) -> None:
    missing = next(option for option in program.options if option.is_required)
    with pytest.raises(UsageError, match=rf"^{missing.flag} is missing; .*{missing.variable}.*{missing.name} in a"):
        read(program).require()


def test_a_contradiction_names_the_sources_of_its_parts(write: Callable[[str], Path]) -> None:
    file = write('model = "m"\nmax_num_seqs = 64\nblock_size = 8')
    settings = read(OFFLINE, "--max-num-batched-tokens", "8", file=file, environment={"PENSTOCK_DTYPE": "float32"})
    with pytest.raises(ConfigurationError, match=r"at least max_num_seqs \(64\)") as caught, settings.naming_sources():
        settings.make(EngineConfig)
    assert str(caught.value).endswith(f"(given: max_num_seqs in {file})")


def test_an_invalid_secret_is_not_printed(write: Callable[[str], Path]) -> None:
    with pytest.raises(UsageError, match="must be a string, got 'list'"):
        read(START, file=write('redis_url = ["redis://:secret@host"]'))


def test_an_unknown_variable_is_nobodys() -> None:
    assert source(read(START, environment={"PENSTOCK_DATA_DIR": "x", "PENSTOCK_ZZZ": "1"}), "block_size") == ""
