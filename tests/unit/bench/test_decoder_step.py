"""The decoder's step alone: its command runs it for real, in a process of its own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from penstock.ops.lab.bench.decoder_step import main

HAS_COMPILER = any(shutil.which(name) for name in ("c++", "g++", "clang++"))
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 64,
    "vocab_size": 128,
}


@pytest.mark.skipif(not HAS_COMPILER, reason="needs a C++ compiler")
def test_report_has_bytes_read_and_time_of_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(SIZES))
    words = "--quantization int4 --requests 2 --query-len 3 --seq-len 20 --tiles off --rounds 2 --turn-s 0.001"
    assert main([*words.split(), "--config", str(config)]) == 0
    text = capsys.readouterr().out
    (cells,) = ([cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if "this" in line)
    # Of each layer 128 + 64 + 128 + 64 outputs and 128 of the last layer, of 64 inputs in 4.25 bits; 32 places of two
    # requests' keys and values in blocks of 16.
    weights, cache = (2 * 384 + 128) * 64 * 17 // 32, 2 * 2 * 2 * 32 * 32 * 2
    assert float(cells[1]) == pytest.approx((weights + cache) / 1e6, abs=1e-5)
    assert "amx" not in cells[0]
    assert all(float(cell) > 0 for cell in cells[2:4])
    assert cells[4] == cells[7] == "1.000"


@pytest.mark.skipif(not HAS_COMPILER, reason="needs a C++ compiler")
@pytest.mark.usefixtures("warm_python")
def test_adapters_are_measured_next_to_the_plain_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(SIZES))
    words = "--adapters 0,2 --rank 4 --requests 3 --seq-len 20 --tiles off --rounds 2 --turn-s 0.001"
    assert main([*words.split(), "--config", str(config)]) == 0
    lines = [line.split("│") for line in capsys.readouterr().out.splitlines() if "adapters" in line]
    read = {cells[1].split("(")[0].strip(): float(cells[2]) for cells in lines if len(cells) > 2}
    assert list(read) == ["adapters 0", "adapters 2"]
    # Of each layer 4 of the first matrices, filled up to 16 outputs, and 7 of 64 outputs of the second, rank 4.
    num_bytes = 2 * 2 * (4 * 16 * 64 + 7 * 64 * 4) * 2
    assert read["adapters 2"] - read["adapters 0"] == pytest.approx(num_bytes / 1e6, abs=1e-5)


def test_missing_config_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--config", "/none/config.json"])
    assert "there is no file /none/config.json" in capsys.readouterr().err
