"""The compose file's own commands work together, each with the rights of its user of Redis and no others."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from penstock.producer import Client, SamplingParams
from penstock.producer.jobs import JobSet, JobSettings
from penstock.shared.redis_access.rights import Role

from ...processes import DEADLINE_S
from ...yaml_files import load_yaml
from .stack import COMPOSE, FOREIGN, ComposeStack, running, services

# One stack for all, which the last of them ends.
pytestmark = pytest.mark.xdist_group("compose")

CHAT = {"messages": [{"role": "user", "content": "count from one to three:"}], "max_tokens": 8}
PARAMS = SamplingParams(temperature=0.0, max_tokens=8)
OPEN = ("validating", "in_progress", "finalizing")
PROCESSES = ("worker", "gateway", "jobs", "dashboard", "metrics")
PAGES = ("/", "/queue", "/requests", "/engines", "/dead", "/batches", "/webhooks", "/system", "/audit", "/operators")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComposeStack]:
    yield from running(tmp_path_factory.mktemp("compose"))


@pytest.fixture(autouse=True)
def _no_blocking_calls() -> None:
    """Overrides the project's: these tests run commands, in a loop that serves no one else."""


async def test_a_token_goes_through_all_of_them(stack: ComposeStack) -> None:
    key = stack.run("penstock", "keys", "create", "acme")
    headers = {"Authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=stack.url("gateway"), headers=headers, timeout=DEADLINE_S) as http:
        async with http.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}) as answer:
            lines = [line async for line in answer.aiter_lines() if line.startswith("data: ")]
        assert lines[-1] == "data: [DONE]"
        assert any(choice["delta"].get("content") for line in lines[:-1] for choice in json.loads(line[6:])["choices"])
        response = (await http.post("/v1/responses", json={"input": "count from one to three:"})).json()
        assert (await http.get(f"/v1/responses/{response['id']}")).json()["id"] == response["id"]
        # A batch is made by the gateway, run by jobs, and answered by the worker; the file is in the shared volume.
        row = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": CHAT | {"model": "demo"}}
        upload = {"purpose": (None, "batch"), "file": ("rows.jsonl", json.dumps(row))}
        file_id = (await http.post("/v1/files", files=upload)).json()["id"]
        batch: dict[str, Any] = {"input_file_id": file_id, "endpoint": "/v1/chat/completions"}
        created = (await http.post("/v1/batches", json=batch | {"completion_window": "24h"})).json()
        async with asyncio.timeout(DEADLINE_S):
            while (created := (await http.get(f"/v1/batches/{created['id']}")).json())["status"] in OPEN:
                await asyncio.sleep(0.1)
        assert (created["status"], created["request_counts"]["completed"]) == ("completed", 1), created
        figures = (await http.get(stack.url("metrics") + "/metrics")).text
        engines = (await http.get(stack.url("worker") + "/metrics")).text
    assert "penstock_build_info" in figures
    assert "penstock_redis_append_only" in figures
    # By the name that the file gives it.
    assert 'penstock_engine_up{engine="demo-0",model_name="demo"} 1.0' in engines
    assert stack.denied() == []


async def test_operators(stack: ComposeStack) -> None:
    key = stack.run("penstock", "operator", "create", "me", "--role", "admin")
    async with httpx.AsyncClient(base_url=stack.url("dashboard"), timeout=DEADLINE_S, follow_redirects=True) as http:
        await http.post("/login", data={"key": key}, headers={"Origin": stack.url("dashboard")})
        for path in PAGES:
            answer = await http.get(path)
            assert (answer.status_code, answer.url.path) == (200, path)
    for command in (["status"], ["queue", "show", "demo"], ["queue", "pause", "demo"], ["queue", "resume", "demo"]):
        stack.run("penstock", *command)
    assert stack.denied() == []


async def test_apps(stack: ComposeStack) -> None:
    """The app gets its user from the same command as the gateway."""
    async with Client.connect(stack.redis_url(Role.CLIENT)) as client:
        streamed = [delta async for delta in client.stream("count from one to three:", PARAMS)]
        handle = await client.submit("count from one to three:", PARAMS)
        assert (await handle.result()).text == "".join(delta.text for delta in streamed)
        await (await client.submit("count from one to three:", PARAMS)).cancel()
        assert await client.models()
        async with client.converse(PARAMS) as conversation:
            await conversation.send("count from one to three:")
            assert [delta async for delta in conversation.segment()]
            await conversation.close_input()
    pool = JobSet(JobSettings(redis_url=stack.redis_url(Role.JOBS))).pool()
    job = await pool.enqueue_job("generate", "count from one to three:", {"temperature": 0.0, "max_tokens": 8})
    assert job is not None
    assert (await job.result(timeout=DEADLINE_S))["outputs"]
    await pool.aclose(close_connection_pool=True)
    assert stack.denied() == []


def test_no_password_is_visible_to_other_processes(stack: ComposeStack) -> None:
    """Neither on a command line, nor in an environment, nor in a log."""
    passwords = [stack.redis_url(role).split(":")[2].partition("@")[0] for role in Role]
    assert len(set(passwords)) == len(Role)
    for name in ("redis", *PROCESSES):
        parent = psutil.Process(stack.pid(name))
        for process in (parent, *parent.children(recursive=True)):
            visible = " ".join([*process.cmdline(), *process.environ().values()])
            assert not any(password in visible for password in passwords), (name, process.cmdline())
        assert not any(password in stack.log(name) for password in passwords), name
    assert not any(password in (stack.secrets / "users.acl").read_text() for password in passwords)
    assert all(path.stat().st_mode & 0o077 == 0 for path in stack.secrets.glob("*.url"))


def test_all_notify_their_service_manager_and_end_in_order(stack: ComposeStack) -> None:
    """The last test that uses the stack: it ends it."""
    for name in PROCESSES:
        (ready,) = stack.told(name)
        assert ready.startswith("READY=1\nSTATUS="), ready
    assert stack.stop() == dict.fromkeys(("redis", *PROCESSES), 0)
    assert {name: stack.told(name) for name in PROCESSES} == {key: ["STOPPING=1"] for key in PROCESSES}


def test_the_file_names_what_is_there() -> None:
    whole = load_yaml(COMPOSE.read_text())
    for name, service in services().items():
        for mount in service.get("volumes", []):
            source = mount.split(":")[0]
            exists = (COMPOSE.parent / source).exists() if source.startswith(".") else source in whole["volumes"]
            assert exists, (name, source)
        assert set(service.get("secrets", [])) <= set(whole["secrets"]), name
        assert not any("URL" in variable and "FILE" not in variable for variable in service.get("environment", {}))
        ports = re.findall(r"http://127\.0\.0\.1:(\d+)/", str(service.get("healthcheck")))
        assert set(ports) <= set(service.get("command", [])), name
        if name not in FOREIGN | {"redis"}:
            assert "user" not in service or not str(service["user"]).startswith("0")
            assert service["read_only"] is True
            assert service["cap_drop"] == ["ALL"]
    files = {Path(secret["file"]).name for secret in whole["secrets"].values()}
    assert files == {"users.acl", *(f"{role}.url" for role in Role if role is not Role.CLIENT)}
