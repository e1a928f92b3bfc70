"""``penstock dashboard`` as a process, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from penstock.ops import cli as penstock_cli
from penstock.ops.local.server import LocalServer
from penstock.shared.process.command_line import EXIT_FAILED, EXIT_USAGE

from ...processes import DEADLINE_S

HTML = {"accept": "text/html"}


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_others_are_not_let_in_unasked(host: str, redis_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["dashboard", "--host", host, "--port", "0", "--redis-url", redis_url]
    assert penstock_cli.main(command) == EXIT_FAILED
    told = capsys.readouterr().err
    assert f"does not listen on {host}" in told
    assert "--keys on" in told
    assert "--auth-header" in told


@pytest.mark.parametrize(
    "options",
    [["--keys", "on", "--auth-header", "X-User"], ["--role", "ann=king"], ["--trusted-proxy", "ten"]],
)
def test_wrong_options_are_refused_by_name(
    options: list[str], redis_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    auth = [] if "--keys" in options else ["--auth-header", "X-User"]
    status = penstock_cli.main(["dashboard", "--port", "0", "--redis-url", redis_url, *auth, *options])
    assert status in (EXIT_FAILED, EXIT_USAGE)
    assert options[0] in capsys.readouterr().err


def test_it_serves_this_machine_and_ends_in_order_under_an_open_stream(redis_url: str, tmp_path: Path) -> None:
    with LocalServer("dashboard", redis_url, ["--namespace", "of-a-command"], tmp_path / "log") as server:
        assert server.base_url.startswith("http://127.0.0.1:")
        assert httpx.get(server.base_url, headers=HTML, timeout=DEADLINE_S).status_code == 200
        assert (
            httpx.get(server.base_url, headers=HTML | {"host": "evil.example"}, timeout=DEADLINE_S).status_code == 421
        )
        with httpx.stream("GET", f"{server.base_url}/live/overview", headers=HTML, timeout=DEADLINE_S) as stream:
            assert next(stream.iter_text()).startswith("data: ")
            assert server.stop() == 0


def test_an_address_that_is_taken_is_a_sentence(redis_url: str, tmp_path: Path) -> None:
    with LocalServer("dashboard", redis_url, [], tmp_path / "log") as server:
        port = server.base_url.rpartition(":")[2]
        other = LocalServer("dashboard", redis_url, [], tmp_path / "other", port=int(port))
        with pytest.raises(Exception, match=f"port {port}"):
            other.start()
