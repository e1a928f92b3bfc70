"""Messages of a start: who can use the gateway, and why it does not start."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from penstock.ops.local.server import LocalGateway
from penstock.shared.errors import ConfigurationError

# Those of the other files here are started in the ordinary way.
pytestmark = pytest.mark.usefixtures("warm_python")


def start(redis_url: str, tmp_path: Path, *options: str) -> str:
    """The log of a gateway that was started and stopped, or would not start."""
    gateway = LocalGateway(redis_url, ["--files-dir", str(tmp_path / "files"), *options], tmp_path / "gateway.log")
    try:
        with gateway:
            pass
    except ConfigurationError:
        return gateway.log
    return gateway.log


@pytest.mark.parametrize(
    ("options", "warned"),
    [
        (["--host", "0.0.0.0"], "open_without_api_keys"),
        (["--host", "127.0.0.1"], None),
        (["--host", "localhost"], None),
        (["--host", "0.0.0.0", "--api-keys", "on"], None),
        (["--cors-origin", "*"], "open_to_all_web_pages"),
        (["--cors-origin", "https://*.example.org"], None),
    ],
)
def test_the_start_message_states_who_has_access(
    redis_url: str, tmp_path: Path, options: list[str], warned: str | None
) -> None:
    lines = [json.loads(line) for line in start(redis_url, tmp_path, *options).splitlines()]
    # The Redis of the tests keeps nothing, which is reported as well.
    assert lines.pop(0)["risk"] == "redis_not_persistent"
    assert [line["level"] for line in lines] == (["warning"] if warned else [])
    assert [line["event"] for line in lines] == ([warned] if warned else [])
    assert all("API keys are off" in line["reason"] for line in lines)


def test_why_it_does_not_start_is_a_sentence_in_the_form_of_the_log(redis_url: str, tmp_path: Path) -> None:
    (tmp_path / "no folder").touch()
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        for options, reason in (
            (["--files-dir", str(tmp_path / "no folder")], "name another with --files-dir"),
            (["--port", str(listener.getsockname()[1])], "pass another --host or --port"),
            (["--host", "no.such.host.invalid"], "cannot listen on host 'no.such.host.invalid'"),
            (["--cors-origin", "example.org"], "got 'example.org'"),
            (["--otlp-traces-endpoint", "grpc://c:4317"], "otlp_traces_endpoint must be the URL of a receiver"),
            (["--redis-url", "redis://127.0.0.1:1"], "no Redis can be reached"),
        ):
            (tmp_path / "gateway.log").unlink(missing_ok=True)
            *_, line = map(json.loads, start(redis_url, tmp_path, *options).splitlines())
            assert (line["event"], line["level"]) == ("gateway_not_started", "critical")
            assert reason in line["error"]
            assert "Traceback" not in line["error"]


def test_people_read_the_same_sentence(redis_url: str) -> None:
    command = [sys.executable, "-m", "penstock.ops.cli", "gateway", "--redis-url", redis_url, "--port", "99999"]
    ended = subprocess.run([*command, "--log-format", "pretty"], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    sentence = ended.stderr.splitlines()[-1]
    assert sentence.startswith("error: cannot listen on host '127.0.0.1', port 99999 (")
    assert sentence.endswith("); pass another --host or --port")
