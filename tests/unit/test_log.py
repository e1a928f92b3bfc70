"""The log lines of Penstock's processes."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
import warnings
from collections.abc import Iterator

import pytest
import structlog

from penstock.shared.errors import ConfigurationError
from penstock.shared.process.log import configure_logging

from ..processes import DEADLINE_S


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def test_json_carries_bound_variables_level_and_logger() -> None:
    out = io.StringIO()
    configure_logging("info", "json", out)
    structlog.contextvars.bind_contextvars(request_id="r1", engine_id="e0")
    structlog.get_logger("penstock.test").info("claimed", message="any key may be used", count=3)
    record = json.loads(out.getvalue())
    assert record["event"] == "claimed"
    assert (record["request_id"], record["engine_id"], record["count"]) == ("r1", "e0", 3)
    assert (record["level"], record["logger"]) == ("info", "penstock.test")
    assert record["timestamp"].endswith("Z")


def test_standard_library_records_have_the_same_form() -> None:
    out = io.StringIO()
    configure_logging("info", "json", out)
    structlog.contextvars.bind_contextvars(engine_id="e0")
    logging.getLogger("other").warning("loaded %d files", 3, extra={"folder": "f"})
    record = json.loads(out.getvalue())
    assert record["event"] == "loaded 3 files"
    assert (record["engine_id"], record["folder"], record["level"]) == ("e0", "f", "warning")


def test_warnings_become_records() -> None:
    out = io.StringIO()
    configure_logging("info", "json", out)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)
        warnings.warn("careful", stacklevel=1)
        logging.captureWarnings(False)
    assert "careful" in json.loads(out.getvalue())["event"]


@pytest.mark.parametrize("fmt", ["json", "pretty"])
def test_traceback_without_local_variables(fmt: str) -> None:
    out = io.StringIO()
    configure_logging("info", fmt, out)
    secret = "secret-prompt"
    try:
        raise RuntimeError(len(secret))
    except RuntimeError:
        structlog.get_logger("penstock.test").exception("failed")
    assert "RuntimeError: 13" in out.getvalue()
    assert secret not in out.getvalue()


def test_an_event_is_a_name_for_programs_and_words_for_people() -> None:
    for fmt, expected in (("json", '"engine_ready"'), ("pretty", "engine ready")):
        out = io.StringIO()
        configure_logging("info", fmt, out)
        structlog.get_logger("penstock.test").info("engine_ready", model="my_model")
        logging.getLogger("other").info("my_file.py was read_again")
        assert expected in out.getvalue()
        assert "my_model" in out.getvalue()
        assert "my_file.py was read_again" in out.getvalue()


def test_records_below_the_level_are_dropped() -> None:
    out = io.StringIO()
    configure_logging("warning", "json", out)
    structlog.get_logger("penstock.test").info("quiet")
    logging.getLogger("other").info("quiet")
    assert out.getvalue() == ""


def test_second_call_replaces_the_first_also_for_loggers_in_use() -> None:
    first, second = io.StringIO(), io.StringIO()
    log = structlog.get_logger("penstock.test")
    configure_logging("info", "json", first)
    log.info("one")
    configure_logging("info", "pretty", second)
    log.info("two")
    assert "one" in first.getvalue()
    assert "two" not in first.getvalue()
    assert "two" in second.getvalue()
    assert not second.getvalue().startswith("{")


def test_auto_is_json_unless_the_stream_is_a_terminal() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    plain, terminal = io.StringIO(), Terminal()
    for out in (plain, terminal):
        configure_logging("info", "auto", out)
        structlog.get_logger("penstock.test").info("hello")
    assert plain.getvalue().startswith("{")
    assert not terminal.getvalue().startswith("{")


@pytest.mark.parametrize(("level", "fmt"), [("loud", "json"), ("info", "xml")])
def test_unknown_names_are_refused(level: str, fmt: str) -> None:
    with pytest.raises(ConfigurationError, match="must be one of"):
        configure_logging(level, fmt)


def test_import_changes_nothing_in_the_host_program() -> None:
    code = (
        "import logging, structlog; before = structlog.get_config(); import penstock.shared.process.log;"
        "assert not logging.getLogger().handlers and not structlog.is_configured()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=DEADLINE_S)
