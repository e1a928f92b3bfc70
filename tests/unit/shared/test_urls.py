"""No part of a password appears in messages about a wrong or a right URL."""

from __future__ import annotations

import io
import logging
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.producer.gateway.settings import GatewaySettings
from penstock.producer.webhooks.addresses import check_url
from penstock.producer.webhooks.events import WebhookSecret
from penstock.shared.errors import ConfigurationError, PenstockError
from penstock.shared.process.command_line import Command, run_program
from penstock.shared.process.log import configure_logging
from penstock.shared.redis_access.check import explain
from penstock.shared.redis_access.url import parse_pool
from penstock.shared.shards.addresses import mask_shards, parse_shards
from penstock.shared.tracing.endpoint import check_endpoint
from penstock.shared.values.shown import mask_text, mask_url
from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.config.worker_config import WorkerConfig

# No message has two of these letters in a row of four characters.
RARE = "QXZJKV"
PASSWORDS = st.text(RARE + "47/?#@:%&=[]+,;", min_size=4, max_size=12)
# Of each kind of URL, of which there are eleven.
few_examples = settings(max_examples=40)
BUILDERS: list[Callable[[str], str]] = [
    lambda password: f"redis://app:{password}@host:6379/0",
    lambda password: f"redis://:{password}@host",
    lambda password: f"rediss://app:{password}@host/0?ssl_ca_certs=/ca.pem",
    lambda password: f"unix://app:{password}@/run/redis.sock",
    lambda password: f"redis://host/0?password={password}",
    lambda password: f"redis+sentinel://app:{password}@h1:1,h2:2/main/0",
    lambda password: f"redis+sentinel://h1:1,h2:2/main?sentinel_password={password}",
    lambda password: f"redis+cluster://app:{password}@h1:1,h2:2",
    lambda password: f"http://app:{password}@host:8080",
    lambda password: f"http://host:8080/v1/traces?api_key={password}",
    lambda password: f"app:{password}@host:6379",
]


def check_hidden(password: str, *texts: object) -> None:
    parts = {password[at : at + 4] for at in range(len(password) - 3)}
    telling = [part for part in parts if sum(character in RARE for character in part) >= 2]
    for text in map(str, texts):
        for part in telling:
            assert part not in text, f"{part!r} of {password!r} is in {text!r}"


def messages_of(url: str) -> Iterator[str]:
    """Yield each URL reader's message about ``url``, with the traceback that Python would print."""
    readers: list[Callable[[], object]] = [
        lambda: parse_pool(url),
        lambda: parse_shards(f"a={url}"),
        lambda: parse_shards(url),
        lambda: parse_shards([url]),
        lambda: check_endpoint(url),
        lambda: check_url(url),
        lambda: EngineConfig(model="m", engine="http", engine_url=url),
    ]
    for reader in readers:
        try:
            reader()
        except PenstockError as error:
            yield "".join(line for line in traceback.format_exception(error) if not line.startswith("  File"))


@contextmanager
def logging_into(fmt: str) -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level, old = root.handlers[:], root.level, structlog.get_config()
    stream = io.StringIO()
    configure_logging("info", fmt, stream)
    try:
        yield stream
    finally:
        root.handlers, root.level = handlers, level
        structlog.configure(**old)


@pytest.mark.parametrize("build", BUILDERS)
@few_examples
@given(password=PASSWORDS)
def test_no_message_has_a_part_of_the_password(build: Callable[[str], str], password: str) -> None:
    url = build(password)
    shards = f"a=redis://h,b={url},c={url}"
    check_hidden(password, mask_url(url), mask_shards(url), mask_shards(shards), *messages_of(url))


@pytest.mark.parametrize("build", [build for build in BUILDERS if build("").startswith(("redis://", "unix", "rediss"))])
@few_examples
@given(password=PASSWORDS)
def test_an_accepted_url_has_no_part_of_the_password_elsewhere(build: Callable[[str], str], password: str) -> None:
    """Host, port, path and database, as redis-py reads them, stand in its errors."""
    try:
        pool = parse_pool(build(password))
    except ConfigurationError:
        return
    read = {name: value for name, value in pool.connection_kwargs.items() if name not in ("password", "username")}
    check_hidden(password, read, pool, explain(ConnectionError("refused"), build(password)))


@pytest.mark.parametrize("build", [build for build in BUILDERS if "://" in build("")])
@few_examples
@given(password=PASSWORDS)
def test_no_repr_has_a_part_of_the_password(build: Callable[[str], str], password: str) -> None:
    url = build(password)
    try:
        engine = EngineConfig(model="m", engine="http", engine_url=url)
    except ConfigurationError:
        engine = EngineConfig(model="m")
    worker = WorkerConfig(worker_id="w", engine_id="e", redis_url=url, shards=f"a={url}", engine=engine)
    secret = WebhookSecret(tenant="t", url=url, current=password, previous=password, created_at=0.0)
    check_hidden(password, engine, worker, secret, GatewaySettings(redis_url=url), secret.__rich_repr__())


@pytest.mark.parametrize("fmt", ["json", "pretty"])
@given(password=PASSWORDS)
def test_no_log_line_has_a_part_of_the_password(fmt: str, password: str) -> None:
    """Other libraries log URLs, and so do the exceptions that they raise."""
    url = f"http://app:{password}@host:8080/v1/traces"
    with logging_into(fmt) as stream:
        logging.getLogger("urllib3").warning("cannot reach %s", url)
        structlog.get_logger().warning("engine_lost", reason=f"nobody answers at {url}")
        try:
            raise ValueError(f"no answer from {url}")
        except ValueError:
            structlog.get_logger().exception("server_failed")
    assert "***" in stream.getvalue()
    check_hidden(password, stream.getvalue())


@given(password=PASSWORDS)
def test_no_command_prints_a_part_of_the_password(password: str) -> None:
    url = f"redis://app:{password}@host"

    def fail(_: object) -> int:
        raise ConfigurationError(f"cannot use {url}")

    commands = (Command("fail", "Fail.", fail), Command("pass", "Pass.", lambda _: 0))
    buffer = io.StringIO()
    stderr, sys.stderr = sys.stderr, buffer
    try:
        run_program("program", "A program.", commands, ["fail"])
        for words in (["pass", url], [url], ["pass", f"--redis={url}"]):
            with pytest.raises(SystemExit):
                run_program("program", "A program.", commands, words)
    finally:
        sys.stderr = stderr
    check_hidden(password, buffer.getvalue())


def test_a_script_that_ends_by_the_error_prints_no_password() -> None:
    script = "from penstock.producer import LLM\nLLM('redis://app:QXy/ZJq9@host')"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "percent-encoded" in ended.stderr
    assert "redis://app:***@host" in ended.stderr
    # The line of the script itself, which Python 3.13 quotes, is the caller's own.
    check_hidden("QXy/ZJq9", ended.stdout, ended.stderr.replace(script.splitlines()[-1], ""))


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("redis://h?decode_responses=True", "decode_responses is no option"),
        ("redis://h?protocol=3", "leave the option protocol out"),
        ("redis://h?sokcet_timeout=3", "sokcet_timeout is no option"),
        ("redis://h?db=1&db=2", "db is given twice"),
        ("redis://h?db", "NAME=VALUE"),
        ("redis://h?db=one", "Invalid value for 'db'"),
        ("redis://h?ssl_ca_certs=/ca.pem", "ssl_ca_certs is no option"),
        ("rediss://h?ssl_cert_reqs=never", "ssl_cert_reqs must be one of"),
        ("redis://h?sentinel_password=x", "sentinel_password is no option"),
        ("redis://h/abc", "number of a database"),
        ("redis://h/1/2", "number of a database"),
        ("redis://h/-1", "number of a database"),
        ("redis://h:0", "port must be"),
        ("redis://h:70000", "port must be"),
        ("redis://a..b", "host name"),
        ("redis://h#1", "'#'"),
        ("redis://h/\n0", "control character"),
        ("redis://:p\udcffw@h", "UTF-8"),
        ("unix://run/redis.sock", "unix:///PATH"),
        ("unix://", "unix:///PATH"),
        ("redis+sentinel://h/main/abc", "must be redis\\+sentinel"),
    ],
)
def test_urls_with_a_mistake_are_refused_by_name(url: str, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        parse_pool(url)


@pytest.mark.parametrize(
    "url",
    [
        "redis://h/0/",
        "redis://h/?db=3&client_name=app&socket_timeout=2&health_check_interval=5&max_connections=9&protocol=2",
        "rediss://u:p%2Fw@h:1/2?ssl_cert_reqs=none&ssl_ca_certs=/ca.pem&ssl_check_hostname=false",
        "unix:///tmp/a@b.sock?db=2&username=u&password=p",
        "unix://:pw@/tmp/redis.sock",
        "redis://:p@ss@h",
        "redis://[::1]:6379/1",
    ],
)
def test_every_documented_form_is_accepted(url: str) -> None:
    assert parse_pool(url).make_connection() is not None


def test_text_without_a_password_stays() -> None:
    text = "metrics at http://127.0.0.1:9100/metrics, mail to me@example.com; see https://example.com/a."
    assert mask_text(text) == text
