"""Files and batches as users see them: the `openai` package against the gateway, and the command from the shell."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from anthropic.types import Message
from openai.types.chat import ChatCompletion
from openai.types.responses import Response

from penstock.ops.cli import main
from penstock.ops.local.server import LocalGateway
from penstock.ops.local.stack import LocalStack
from penstock.producer import Client
from penstock.producer.batches import BatchStore, run_batch

from ...processes import DEADLINE_S

pytestmark = pytest.mark.xdist_group("deployment")

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES = "/v1/messages"


def line(custom_id: str, url: str = COMPLETIONS, **body: Any) -> str:
    fields = {"model": "demo", "temperature": 0} | body
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": fields}) + "\n"


@pytest.fixture
def sdk(gateway: LocalGateway) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=gateway.base_url, api_key="any", max_retries=0, timeout=DEADLINE_S) as sdk:
        yield sdk


async def called(call: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a blocking method of the package; the test says whether it may be None."""
    return await asyncio.to_thread(call, *arguments)


def form_part(name: str, value: bytes, filename: str = "") -> bytes:
    named = f'; filename="{filename}"' if filename else ""
    return f'--b\r\nContent-Disposition: form-data; name="{name}"{named}\r\n\r\n'.encode() + value + b"\r\n"


def test_files(sdk: openai.OpenAI, gateway: LocalGateway) -> None:
    expiry: Any = {"anchor": "created_at", "seconds": 7200}
    first = sdk.files.create(file=("é.jsonl", b"{}\n" * 500_000), purpose="batch", expires_after=expiry)
    assert (first.bytes, first.filename, first.purpose, first.status) == (1_500_000, "é.jsonl", "batch", "processed")
    assert first.expires_at == first.created_at + 7200
    assert sdk.files.retrieve(first.id) == first
    assert sdk.files.content(first.id).content == b"{}\n" * 500_000
    others = [sdk.files.create(file=b"{}", purpose="batch") for _ in range(3)]
    # The package asks for page after page.
    assert [file.id for file in sdk.files.list(limit=2)][:4] == [*(file.id for file in reversed(others)), first.id]
    assert sdk.files.delete(first.id).deleted
    for call in (sdk.files.retrieve, sdk.files.content, sdk.files.delete):
        with pytest.raises(openai.NotFoundError, match=first.id):
            call(first.id)
    with pytest.raises(openai.BadRequestError, match="purpose must be 'batch'"):
        sdk.files.create(file=b"{}", purpose="vision")
    with pytest.raises(openai.BadRequestError, match="limit must be 1 to 10000"):
        sdk.files.list(limit=0)
    # As curl sends it, the file first; and an incomplete form.
    url = f"{gateway.base_url}/files"
    with httpx.Client(timeout=DEADLINE_S) as http:
        file, purpose = form_part("file", b"{}", "a"), form_part("purpose", b"batch")
        forms = {
            file + purpose + b"--b--\r\n": "200",
            file + b"--b--\r\n": "purpose must be given",
            purpose + b"--b--\r\n": "file must be given",
            file + file + b"--b--\r\n": "file must be one file",
            form_part("size", b"1") + b"--b--\r\n": "file must be given",
            file[:-5]: "the form is incomplete",
            b"{}": "the form cannot be read",
        }
        for body, message in forms.items():
            reply = http.post(url, content=body, headers={"content-type": "multipart/form-data; boundary=b"})
            assert message in f"{reply.status_code} {reply.text}"
            assert reply.status_code in (200, 400)
        assert "must be multipart/form-data" in http.post(url, json={}).text


async def test_batches(sdk: openai.OpenAI, store: BatchStore, client: Client) -> None:
    def begin(*lines: str, **options: Any) -> Any:
        file = sdk.files.create(file=("in.jsonl", "".join(lines).encode()), purpose="batch")
        return sdk.batches.create(
            input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"night": "1"}, **options
        )

    messages = [{"role": "user", "content": "four plus two is"}]
    lines = [line("good", CHAT, messages=messages), line("bad", CHAT, messages=messages, top_p=7)]
    batch = await called(begin, *lines)
    assert (batch.status, batch.metadata, batch.endpoint) == ("validating", {"night": "1"}, CHAT)
    batch = await run_to_end(sdk, store, client, batch)
    assert (batch.status, batch.errors, batch.model) == ("completed", None, "demo")
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (2, 1, 1)
    assert batch.usage.total_tokens == batch.usage.input_tokens + batch.usage.output_tokens > 0
    output = await row_of(sdk, batch.output_file_id)
    answer = ChatCompletion.model_validate(output["response"]["body"])
    assert (output["custom_id"], output["response"]["status_code"], output["error"]) == ("good", 200, None)
    assert answer.choices[0].message.content == " six."
    errors = await row_of(sdk, batch.error_file_id)
    assert (errors["custom_id"], errors["response"]["status_code"]) == ("bad", 400)
    assert errors["response"]["body"]["error"]["param"] == "top_p"

    responses_id = await check_responses(sdk, store, client)
    messages_id = await check_messages(sdk, store, client)

    refused = await run_to_end(sdk, store, client, await called(begin, "{\n", line("a", COMPLETIONS, prompt="hi")))
    assert refused.status == "failed"
    assert [(error.line, error.code) for error in refused.errors.data] == [
        (1, "invalid_json_line"),
        (2, "url_mismatch"),
    ]

    cancelled = await called(begin, lines[0])
    assert (await called(sdk.batches.cancel, cancelled.id)).status == "cancelling"
    cancelled = await run_to_end(sdk, store, client, cancelled)
    assert (cancelled.status, cancelled.request_counts.failed) == ("cancelled", 1)
    with pytest.raises(openai.ConflictError, match="has ended"):
        await called(sdk.batches.cancel, cancelled.id)
    ids = await called(lambda: [one.id for one in sdk.batches.list(limit=2)])
    assert ids[:5] == [cancelled.id, refused.id, messages_id, responses_id, batch.id]
    for wrong in ({"endpoint": "/v1/moderations"}, {"completion_window": "1h"}, {"extra_body": {"metadata": 1}}):
        with pytest.raises(openai.BadRequestError):
            await called(begin_with, sdk, batch.input_file_id, wrong)
    with pytest.raises(openai.NotFoundError):
        await called(sdk.batches.retrieve, "batch_0")


async def check_responses(sdk: openai.OpenAI, store: BatchStore, client: Client) -> str:
    """Run a batch of responses, and return its id."""
    batch = await run_rows(sdk, store, client, RESPONSES, line("response", RESPONSES, input="four plus two is"))
    output = await row_of(sdk, batch.output_file_id)
    assert Response.model_validate(output["response"]["body"]).output_text == " six."
    return batch.id


async def check_messages(sdk: openai.OpenAI, store: BatchStore, client: Client) -> str:
    """Run a batch of messages, and return its id."""
    body: dict[str, Any] = {"max_tokens": 20, "messages": [{"role": "user", "content": "four plus two is"}]}
    rows = line("good", MESSAGES, **body) + line("bad", MESSAGES, **body | {"top_p": 3})
    batch = await run_rows(sdk, store, client, MESSAGES, rows)
    output = await row_of(sdk, batch.output_file_id)
    assert Message.model_validate(output["response"]["body"]).content[0].to_dict()["text"] == " six."
    errors = await row_of(sdk, batch.error_file_id)
    assert errors["response"]["body"]["error"]["type"] == "invalid_request_error"
    return batch.id


async def run_rows(sdk: openai.OpenAI, store: BatchStore, client: Client, endpoint: str, rows: str) -> Any:
    file = await called(lambda: sdk.files.create(file=rows.encode(), purpose="batch"))
    return await run_to_end(sdk, store, client, await called(begin_with, sdk, file.id, {"endpoint": endpoint}))


async def run_to_end(sdk: openai.OpenAI, store: BatchStore, client: Client, batch: Any) -> Any:
    """Run a batch, and return its final state."""
    await run_batch(client, store, batch.id)
    return await called(sdk.batches.retrieve, batch.id)


async def row_of(sdk: openai.OpenAI, file_id: str) -> Any:
    """Return the only row of a file of results."""
    return json.loads((await called(sdk.files.content, file_id)).text)


def begin_with(sdk: openai.OpenAI, file_id: str, changed: dict[str, Any]) -> Any:
    fields: dict[str, Any] = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
    return sdk.batches.create(**(fields | changed))


def test_the_command_reports_wrong_rows_and_runs_the_others(
    deployment: LocalStack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"

    def batch(*arguments: str) -> tuple[int, str, str]:
        """Return exit status, output and standard error."""
        status = main(["batch", *arguments, "--redis-url", deployment.url, "--tenant", "shell"])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    run = ("run", str(source), "-o", str(output), "--files-dir", str(tmp_path / "files"))
    source.write_text(line("a", prompt="spell 407:") + line("a", prompt="spell 8:"))
    wrong = f"{source}:2: custom_id must be unique, got 'a' as in line 1 (duplicate_custom_id)\n"
    assert batch(*run) == (1, "", wrong)
    source.write_text(line("a", prompt="spell 407:") + line("b", prompt="spell 8:", temperature=-1))
    assert batch(*run)[:2] == (1, f"completed: 1 of 2 rows are in {output}\n")
    answer = json.loads(output.read_text())
    assert answer["response"]["body"]["choices"][0]["text"] == " four hundred seven."
    failed = json.loads((tmp_path / "out.errors.jsonl").read_text())
    assert (failed["custom_id"], failed["response"]["status_code"]) == ("b", 400)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["files", "in.jsonl", "out.errors.jsonl", "out.jsonl"]
    assert "out.jsonl exists" in batch(*run)[2]
    listed = json.loads(batch("list", "--json")[1])
    assert [one["status"] for one in listed] == ["completed", "failed"]
    assert "1 answered and 1 failed of 2" in batch("show", listed[0]["id"])[1]
    assert "has ended" in batch("cancel", listed[0]["id"])[2]
