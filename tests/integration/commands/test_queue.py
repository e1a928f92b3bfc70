"""``penstock queue`` against requests that the test's own broker calls have put in line."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from penstock.ops import cli as penstock_cli
from penstock.ops.words import format_duration
from penstock.shared.broker import Broker, EngineCapacity, FinalRecord, Queue
from penstock.shared.connection import CommandConnection
from penstock.shared.deployment.records import ModelCard
from penstock.shared.keys import Keys
from penstock.shared.messages.deltas import Delta
from penstock.shared.messages.outcome import FinishReason
from penstock.shared.process.command_line import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE
from penstock.shared.queue.policy import TenantPolicy

from ...processes import DEADLINE_S

Run = Callable[..., tuple[int, str, str]]


class Model:
    """The model ``m``, registered as a worker would; each method is one run of an event loop."""

    def __init__(self, url: str, namespace: str) -> None:
        self.redis_arguments = ("--redis-url", url, "--namespace", namespace)
        self._url = url
        self._keys = Keys(namespace)
        self.register("m")

    def do(self, work: Callable[[CommandConnection, Broker, Queue], Awaitable[Any]]) -> Any:
        async def connected() -> Any:
            connection, keys = CommandConnection(self._url), self._keys.model("m")
            try:
                return await work(connection, Broker(connection, keys), Queue(connection, keys))
            finally:
                await connection.close()

        return asyncio.run(connected())

    def register(self, name: str) -> None:
        card = msgspec.json.encode(ModelCard(model=name))
        self.do(lambda connection, *_: connection.execute("HSET", self._keys.models(), name, card))

    def enqueue(self, *request_ids: str, **options: Any) -> None:
        async def work(_: CommandConnection, broker: Broker, __: Queue) -> None:
            for request_id in request_ids:
                await broker.enqueue(
                    request_id, b"payload", result_ttl_ms=60_000, num_prompt_tokens=10, max_tokens=5, **options
                )

        self.do(work)

    def claim(self, num_requests: int) -> list[str]:
        async def work(_: CommandConnection, broker: Broker, __: Queue) -> list[str]:
            wave = await broker.claim("host-1-0", EngineCapacity(max_num_seqs=num_requests))
            return [claim.request_id for claim in wave.claims]

        return self.do(work)

    def finish_all(self) -> None:
        async def work(_: CommandConnection, broker: Broker, __: Queue) -> None:
            delta = Delta(index=0, token_ids=[1], finish_reason=FinishReason.STOP)
            claims = await broker.claims("host-1-0")
            await broker.finish([FinalRecord(request_id, epoch, delta) for request_id, epoch in claims])

        self.do(work)

    def set_rate(self, *, requests_per_s: float, tokens_per_s: float) -> None:
        """Set a rate as if measured of one slot over so long that a slow test changes nothing."""

        async def work(connection: CommandConnection, broker: Broker, _: Queue) -> None:
            key, (seconds, _) = f"{broker.keys.prefix}queue", await connection.execute("TIME")
            entered = int(await connection.execute("HGET", key, "entered:standard") or 0)
            sums = f"1e8 {1e5 * requests_per_s} {1e5 * tokens_per_s} 0"
            text = f"{1000 * int(seconds)} {sums} {sums} {1e5 * tokens_per_s} 1e8 {entered}"
            await connection.execute("HSET", key, "rate:standard", text)

        self.do(work)

    def is_paused(self) -> bool:
        return self.do(lambda _, __, queue: queue.is_paused())


@pytest.fixture
def model(redis_url: str, namespace: str) -> Model:
    return Model(redis_url, namespace)


@pytest.fixture
def queue(redis_url: str, namespace: str, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run ``penstock queue ...`` in this process; returns status, output and errors."""

    def run(*arguments: str) -> tuple[int, str, str]:
        try:
            status = penstock_cli.main(["queue", *arguments, "--redis-url", redis_url, "--namespace", namespace])
        except SystemExit as wrong_call:
            status = int(wrong_call.code or 0)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def lines_of(sheet: str) -> dict[str, str]:
    """A sheet's lines by their names."""
    found = re.findall(r"^([a-z ]+): +(.*)$", sheet, flags=re.MULTILINE)
    return dict(found)


@pytest.mark.parametrize("path", ["", "list", "show", "tenants", "pause", "resume", "purge", "configure", "tenant"])
def test_help(path: str, queue: Run) -> None:
    status, out, _ = queue(*path.split(), "--help")
    assert status == 0
    assert f"usage: penstock queue {path}".strip() in out


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0.04, "0.0 s"),
        (0.44, "0.4 s"),
        (9.96, "10 s"),
        (119.4, "119 s"),
        (119.6, "2 min"),
        (7170.0, "2 h"),
        (47 * 3600, "47 h"),
        (48 * 3600, "2 d"),
    ],
)
def test_durations_as_people_read_them(seconds: float | None, text: str) -> None:
    assert format_duration(seconds) == text


def test_list_has_a_row_per_model(queue: Run, model: Model) -> None:
    model.register("another")
    model.enqueue("a", "b", "c")
    model.claim(1)
    model.set_rate(requests_per_s=2, tokens_per_s=30)
    header, other, row = queue("list")[1].splitlines()
    assert re.split(r" {2,}", header) == (
        ["MODEL", "STATE", "WAITING", "TOKENS", "OLDEST", "RUNNING", "EST. WAIT", "REQ/S", "TOKENS/S"]
    )
    assert other.split() == ["another", "open", "0", "0", "-", "0", "-", "0.0", "0"]
    assert re.fullmatch(r"m +open +2 +30 +(-|\d\.\d s) +1 +1\.0 s +2\.0 +30", row)
    queue("pause", "m")
    assert re.fullmatch(r"m +paused +2 +30 +(-|\d\.\d s) +1 +- +2\.0 +30", queue("list")[1].splitlines()[2])
    listed = json.loads(queue("list", "--json")[1])
    assert [found["model"] for found in listed] == ["another", "m"]
    assert (listed[1]["depth"], listed[1]["num_running"]) == (2, 1)
    assert abs(listed[1]["paused_at"] - time.time()) < 60
    assert listed[0]["estimated_wait_s"] is None
    assert [band["depth"] for band in listed[1]["bands"]] == [0, 2, 0]


def test_list_without_models(queue: Run) -> None:
    assert queue("list") == (0, "no models: no worker has served on this Redis yet\n", "")
    assert queue("list", "--json")[1] == "[]\n"


def test_show_prints_totals_policy_bands_and_the_deepest_lanes(queue: Run, model: Model) -> None:
    model.enqueue("runs", tenant="one")
    model.claim(1)
    model.enqueue("a", tenant="one")
    model.enqueue("b", "c", tenant="two", band="batch")
    model.enqueue("d", "e", "f", tenant="three", band="batch")
    model.set_rate(requests_per_s=1, tokens_per_s=15)
    status, out, _ = queue("show", "m", "--limit", "2")
    sheet, bands, lanes = out.split("\n\n")
    fields = lines_of(sheet)
    assert status == 0
    assert fields["waiting"] == "6"
    assert fields["est wait"] == "about 1.0 s in band standard"
    assert fields["bands"] == "interactive, standard (default), batch"
    assert fields["ageing"].startswith("30 s of waiting")
    assert fields["limits"] == "at most 100000 requests and any number of tokens wait"
    assert fields["tenants"].startswith("weight 1, no quotas")
    assert [row.split()[:4] for row in bands.splitlines()] == [
        ["BAND", "WAITING", "TOKENS", "TENANTS"],
        ["interactive", "0", "0", "0"],
        ["standard", "1", "15", "1"],
        ["batch", "5", "75", "2"],
    ]
    header, first, second, rest = lanes.splitlines()
    assert re.split(r" {2,}", header) == ["TENANT", "BAND", "WAITING", "TOKENS", "OLDEST", "EST. WAIT"]
    assert [row.split()[:4] for row in (first, second)] == [["three", "batch", "3", "45"], ["two", "batch", "2", "30"]]
    assert rest == "1 more: --limit 3 shows them all"
    assert "more:" not in queue("show", "m")[1]


def test_show_as_json_has_every_tenant_and_the_policy(queue: Run, model: Model) -> None:
    model.enqueue("a", tenant="one")
    model.enqueue("b", tenant="two")
    shown = json.loads(queue("show", "m", "--json", "--limit", "0")[1])
    assert shown["model"] == "m"
    assert [(tenant["tenant"], tenant["depth"]) for tenant in shown["tenants"]] == [("one", 1), ("two", 1)]
    assert shown["tenants"][0]["lanes"][0]["band"] == "standard"
    assert shown["policy"]["default_band"] == "standard"
    assert shown["policy"]["tenant"]["over_quota"] == "wait"


def test_show_counts_requests_that_wait_for_their_next_engine(queue: Run, model: Model) -> None:
    model.enqueue("a", "b")
    model.claim(1)
    queue("pause", "m", "--put-back")
    fields = lines_of(queue("show", "m")[1])
    assert fields["state"].startswith("paused since 20")
    assert fields["waiting"] == "2, 1 of them to resume after their last token"
    assert (fields["running"], fields["est wait"]) == ("0", "-")


def test_show_request_prints_its_position(queue: Run, model: Model) -> None:
    model.enqueue("first", "a")
    model.enqueue("b", timeout_ms=600_000)
    model.set_rate(requests_per_s=1, tokens_per_s=15)
    assert model.claim(1) == ["first"]
    waiting = lines_of(queue("show", "m", "--request", "b")[1])
    assert waiting["state"] == "queued"
    assert waiting["position"] == "at most 1 before it in its line"
    assert waiting["est start"] == "in about 2.0 s"
    assert waiting["deadline"].endswith(", in 10 min")
    assert lines_of(queue("show", "m", "--request", "a")[1])["position"] == "the next of its line"
    running = lines_of(queue("show", "m", "--request", "first")[1])
    assert (running["state"], running["engine"], running["attempts"]) == ("claimed", "host-1-0", "1")
    assert (running["position"], running["est start"], running["deadline"]) == ("-", "-", "-")
    shown = json.loads(queue("show", "m", "--request", "b", "--json")[1])
    assert (shown["position"], shown["num_attempts"], shown["tenant"]) == (1, 0, "default")
    status, _, err = queue("show", "m", "--request", "nobody's")
    assert status == EXIT_FAILED
    assert 'has no request "nobody\'s"' in err


def test_tenants_are_those_with_work_and_those_with_a_policy(queue: Run, model: Model) -> None:
    assert queue("tenants")[1].startswith("no tenants")
    queue("tenant", "m", "busy", "--max-concurrent", "1", "--requests-per-minute", "60", "--over-quota", "refuse")
    queue("tenant", "m", "idle", "--weight", "2.5", "--max-queue-depth", "7")
    model.enqueue("a", tenant="busy")
    model.enqueue("b", "c", tenant="plain", band="batch")
    model.enqueue("d", tenant="plain")
    model.claim(1)
    header, *rows = queue("tenants")[1].splitlines()
    assert header.split() == ["TENANT", "WEIGHT", "WAITING", "TOKENS", "OLDEST", "RUNNING", "QUOTAS", "BLOCKED"]
    cells = [re.split(r" {2,}", row) for row in rows]
    by_name = {row[0]: row for row in cells}
    assert list(by_name) == ["plain", "busy", "idle"]
    assert by_name["busy"] == ["busy", "1", "0", "0", "-", "1", "60 req/min, 1 running or refused", "-"]
    assert by_name["idle"] == ["idle", "2.5", "0", "0", "-", "0", "7 waiting", "-"]
    assert by_name["plain"][:4] == ["plain", "1", "3", "45"]
    listed = {tenant["tenant"]: tenant for tenant in json.loads(queue("tenants", "m", "--json")[1])}
    assert listed["idle"]["policy"]["max_queue_depth"] == 7
    assert [listed[name]["has_own_policy"] for name in ("plain", "busy", "idle")] == [False, True, True]
    assert listed["plain"]["depth"] == 3


def test_tenants_over_a_quota_are_blocked(queue: Run, model: Model) -> None:
    queue("tenant", "m", "slow", "--requests-per-minute", "1")
    queue("tenant", "m", "narrow", "--max-concurrent", "1")
    model.enqueue("a", "b", tenant="slow")
    model.enqueue("c", "d", tenant="narrow")
    assert len(model.claim(4)) == 2
    rows = {row.split()[0]: row for row in queue("tenants")[1].splitlines()}
    assert rows["narrow"].endswith("  until one ends")
    assert re.search(r"  \d\d s$", rows["slow"])
    listed = {tenant["tenant"]: tenant for tenant in json.loads(queue("tenants", "--json")[1])}
    assert listed["narrow"]["blocked_for_s"] is None
    assert listed["slow"]["blocked_for_s"] > 0


def test_pause_and_resume(queue: Run, model: Model) -> None:
    model.enqueue("a", "b")
    model.claim(1)
    status, out, _ = queue("pause", "m")
    assert status == 0
    assert "the queue of m is paused, 1 still running" in out
    assert "'penstock queue resume m'" in out
    assert model.claim(2) == []
    assert queue("resume", "m") == (0, "the queue of m is resumed; 1 wait\n", "")
    assert queue("resume", "m")[1] == "the queue of m was not paused; 1 wait\n"
    assert model.claim(2) == ["b"]


def test_pause_requeues_running_requests(queue: Run, model: Model) -> None:
    model.enqueue("a", "b")
    model.claim(2)
    assert "2 running requests were requeued" in queue("pause", "m", "--requeue")[1]
    assert queue("pause", "m", "--put-back", "--wait")[0] == EXIT_USAGE
    queue("resume", "m")
    assert sorted(model.claim(2)) == ["a", "b"]


def test_pause_waits_until_none_runs(queue: Run, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.ops.cli.queues.queue.POLL_INTERVAL_S", 0.01)
    model.enqueue("a", "b")
    model.claim(1)

    def once_paused(act: Callable[[], None]) -> threading.Thread:
        def watch() -> None:
            deadline = time.monotonic() + 60
            while not model.is_paused() and time.monotonic() < deadline:
                time.sleep(0.01)
            act()

        thread = threading.Thread(target=watch)
        thread.start()
        return thread

    thread = once_paused(model.finish_all)
    status, out, _ = queue("pause", "m", "--wait")
    thread.join()
    assert (status, out.splitlines()[-1]) == (0, "none is running any more")
    assert queue("pause", "m", "--wait")[1].count("\n") == 1
    queue("resume", "m")
    model.claim(1)
    thread = once_paused(lambda: model.do(lambda _, __, of: of.resume()))
    status, _, err = queue("pause", "m", "--wait")
    thread.join()
    assert status == EXIT_FAILED
    assert "was resumed meanwhile" in err


def test_interrupted_wait_leaves_it_paused(model: Model) -> None:
    model.enqueue("a")
    model.claim(1)
    command = [sys.executable, "-m", "penstock.ops.cli", "queue", "pause", "m", "--wait", *model.redis_arguments]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A suite that was started in a shell's background ignores Ctrl-C, and so would what it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as program:
        assert program.stdout is not None
        assert "1 still running" in program.stdout.readline()
        program.send_signal(signal.SIGINT)
        try:
            out, err = program.communicate(timeout=DEADLINE_S)
        finally:
            program.kill()
    assert (program.returncode, out, err) == (EXIT_INTERRUPTED, "it stays paused\n", "")
    assert model.is_paused()


def test_purge_cancels_waiting_requests_of_a_tenant(queue: Run, model: Model) -> None:
    model.enqueue("a", "b", tenant="one")
    model.enqueue("c", "d", tenant="one", band="batch")
    model.enqueue("e", tenant="two")
    model.claim(1)
    status, _, err = queue("purge", "m", "--tenant", "one")
    assert status == EXIT_USAGE
    assert "--yes" in err
    assert err.count("\n") == 1
    purged = queue("purge", "m", "--tenant", "one", "--band", "batch", "--yes")
    assert purged == (0, "2 cancelled of tenant one in band batch\n", "")
    assert queue("purge", "m", "--tenant", "one", "--yes")[1] == "1 cancelled of tenant one\n"
    assert queue("purge", "m", "--tenant", "one", "--yes")[1] == "0 cancelled of tenant one\n"
    status, _, err = queue("purge", "m", "--tenant", "one", "--band", "none", "--yes")
    assert status == EXIT_FAILED
    assert "band must be one of interactive, standard, batch, got 'none'" in err
    assert json.loads(queue("list", "--json")[1])[0]["depth"] == 1


def test_purge_asks_on_a_terminal(queue: Run, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    model.enqueue("a", "b", tenant="one")
    asked: list[str] = []

    def answer(word: str | None) -> None:
        def ask(question: str) -> str:
            asked.append(question)
            if word is None:
                raise EOFError
            return word

        monkeypatch.setattr("builtins.input", ask)

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    for refusal in ("", "no", None):
        answer(refusal)
        assert queue("purge", "m", "--tenant", "one") == (EXIT_FAILED, "nothing is cancelled\n", "")
    assert asked[0] == "cancel what waits of tenant one (2)? [y/N] "
    answer("y")
    assert queue("purge", "m", "--tenant", "one")[1] == "2 cancelled of tenant one\n"
    asked.clear()
    assert queue("purge", "m", "--tenant", "one")[0] == 0
    assert "band must be one of" in queue("purge", "m", "--tenant", "one", "--band", "none")[2]
    assert asked == []


def test_configure_changes_only_the_passed_settings(queue: Run, model: Model) -> None:
    plain = queue("configure", "m")
    assert lines_of(plain[1])["order"] == "fcfs"
    assert model.do(lambda connection, broker, _: connection.execute("EXISTS", broker.keys.policy)) == 0
    queue("configure", "m", "--bands", "fast, slow", "--default-band", "slow", "--order", "edf", "--ageing", "none")
    status, out, _ = queue(
        *("configure", "m", "--strictness", "0.5", "--max-queue-depth", "9", "--max-queue-tokens", "99"),
        *("--tenant-requests-per-minute", "60", "--tenant-tokens-per-minute", "5000", "--tenant-max-concurrent", "4"),
        *("--affinity", "250", "--warm-ttl", "60"),
        *("--tenant-over-quota", "refuse", "--tenant-max-queue-depth", "3", "--tenant-max-queue-tokens", "50"),
    )
    fields = lines_of(out)
    assert status == 0
    assert fields["bands"] == "fast, slow (default)"
    assert fields["ageing"] == "none: a low band may starve"
    assert fields["strictness"].startswith("0.5 of")
    known = "for 60 s it is known which engine had them"
    assert fields["sessions"] == f"{known}, and others leave them to it for 250 ms"
    assert fields["limits"] == "at most 9 requests and at most 99 tokens wait"
    assert fields["tenants"].startswith(
        "weight 1, 60 req/min, 5000 tok/min, 4 running or refused, 3 waiting, 50 tokens waiting, unless"
    )
    kept = model.do(lambda _, __, of: of.policy())
    assert (kept.bands, kept.order, kept.ageing_s) == (("fast", "slow"), "edf", None)
    assert (kept.strictness, kept.max_queue_tokens, kept.tenant.max_concurrent_requests) == (0.5, 99, 4)
    assert lines_of(queue("configure", "m", "--tenant-max-queue-depth", "none")[1])["order"] == "edf"
    assert lines_of(queue("configure", "m", "--reset", "--ageing", "90")[1])["ageing"].startswith("90 s")
    assert lines_of(queue("configure", "m", "--warm-ttl", "none")[1])["sessions"] == "go to any engine"
    assert queue("configure", "m", "--reset") == plain


@pytest.mark.parametrize(
    ("arguments", "status", "part"),
    [
        (("--max-queue-depth", "0"), EXIT_USAGE, "--max-queue-depth: must be a positive integer, or none"),
        (("--tenant-max-concurrent", "few"), EXIT_USAGE, "--tenant-max-concurrent: must be a positive integer"),
        (("--ageing", "long"), EXIT_USAGE, "--ageing: must be a number of seconds, or none"),
        (("--affinity", "-1"), EXIT_USAGE, "--affinity: must be a number of milliseconds, got '-1'"),
        (("--affinity", "70000"), EXIT_FAILED, "affinity_ms must be a number in [0, 60000]"),
        (("--warm-ttl", "0"), EXIT_FAILED, "warm_ttl_s must be a number in [0.001"),
        (("--order", "lifo"), EXIT_USAGE, "--order: must be fcfs or edf, got 'lifo'"),
        (("--tenant-over-quota", "drop"), EXIT_USAGE, "--tenant-over-quota: must be wait or refuse"),
        (("--strictness", "2"), EXIT_FAILED, "strictness must be a number in [0.01, 1]"),
        (("--bands", "a,b"), EXIT_FAILED, "default_band must be one of a, b, got 'standard'"),
        (("--bands", "interactive", "--default-band", "interactive"), EXIT_FAILED, "bands must keep standard"),
    ],
)
def test_a_wrong_policy_is_a_sentence(
    queue: Run, model: Model, arguments: tuple[str, ...], status: int, part: str
) -> None:
    model.enqueue("a")
    failed, _, err = queue("configure", "m", *arguments)
    assert failed == status
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert part in err
    assert model.do(lambda connection, broker, _: connection.execute("EXISTS", broker.keys.policy)) == 0


def test_tenant_has_the_default_policy_until_it_gets_its_own(queue: Run, model: Model) -> None:
    queue("configure", "m", "--tenant-max-concurrent", "4")
    default = "acme: weight 1, 4 running (the default policy)\n"
    assert queue("tenant", "m", "acme") == (0, default, "")
    assert queue("tenant", "m", "acme", "--weight", "3")[1] == "acme: weight 3, 4 running (its own policy)\n"
    changed = queue("tenant", "m", "acme", "--max-concurrent", "none", "--tokens-per-minute", "100")[1]
    assert changed == "acme: weight 3, 100 tok/min (its own policy)\n"
    kept = model.do(lambda _, __, of: of.tenant_policies())
    assert kept == {"acme": TenantPolicy(weight=3.0, tokens_per_minute=100)}
    assert queue("tenant", "m", "acme", "--reset", "--weight", "2")[1].startswith("acme: weight 2, 4 running")
    assert queue("tenant", "m", "acme", "--reset")[1] == default
    assert model.do(lambda _, __, of: of.tenant_policies()) == {}
    assert "weight must be a number in" in queue("tenant", "m", "acme", "--weight", "0")[2]
    assert "tenant must hold no braces" in queue("tenant", "m", "{acme}")[2]


def test_a_policy_may_be_set_before_the_model_is_served(queue: Run, model: Model) -> None:
    status, out, _ = queue("configure", "later", "--order", "edf")
    assert (status, "no worker has served 'later' yet" in out) == (0, True)
    status, out, _ = queue("tenant", "later", "acme", "--weight", "2")
    assert (status, "no worker has served 'later' yet" in out) == (0, True)
    model.register("later")
    assert lines_of(queue("show", "later")[1])["order"] == "edf"
    assert "no worker" not in queue("configure", "later")[1]


def test_other_commands_want_a_known_model(queue: Run, model: Model) -> None:
    for arguments in (
        ("show", "typo"),
        ("tenants", "typo"),
        ("pause", "typo"),
        ("resume", "typo"),
        ("purge", "typo", "--tenant", "one", "--yes"),
    ):
        status, _, err = queue(*arguments)
        assert status == EXIT_FAILED
        assert "no worker has ever served model 'typo'" in err
        assert err.count("\n") == 1
    model.register("another")
    assert "another, m" in queue("tenants")[2]
    assert queue("show")[0] == EXIT_USAGE
    assert queue("show", "m", "--limit", "-1")[0] == EXIT_USAGE
    assert queue("purge", "m", "--yes")[0] == EXIT_USAGE
