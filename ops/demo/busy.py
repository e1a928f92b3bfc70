"""``penstock demo --dashboard``: a local deployment under constant load, with the operators' pages."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import tempfile
from pathlib import Path

from ...producer import Client, SamplingParams
from ...producer.inputs.prompt import build_request, encode_request
from ...shared.broker import Broker, EngineCapacity
from ...shared.deployment.records import DeathCause
from ...shared.keys import Keys
from ...shared.queue.policy import TenantPolicy
from ...shared.shards import make_commands
from ..local.server import LocalServer
from ..local.stack import LocalStack
from .run import MODEL
from .task import demo_questions

MODEL_NAME = "demo"
# Weight and number of concurrent requests, by tenant.
TENANTS = {"acme": (3.0, 24), "globex": (1.0, 12)}
_CAUSE = DeathCause(
    engine_id="broken-1-0",
    reason="killed by signal 11 (SIGSEGV) in step 42",
    last_step=42,
    trace="an engine invented by this demo for a parked request",
)


def run_busy(port: int) -> int:
    """Serve the pages until Ctrl-C, and return 0.

    Raises:
        ConfigurationError: the worker or the pages do not start.
    """
    options = ["--device", "cpu", "--served-model-name", MODEL_NAME, "--max-num-seqs", "8"]
    print("starting Redis, a worker with the demo model, and the dashboard …", flush=True)
    with tempfile.TemporaryDirectory() as folder, LocalStack(MODEL, options) as stack:
        pages = LocalServer("dashboard", stack.url, ["--show-contents"], Path(folder) / "dashboard.log", port=port)
        with pages:
            print(f"the dashboard: {pages.base_url}", flush=True)
            print(f"in a terminal: penstock top --redis-url {stack.url}\nCtrl-C stops everything", flush=True)
            with contextlib.suppress(KeyboardInterrupt):
                asyncio.run(keep_busy(stack.url))
    return 0


async def keep_busy(url: str) -> None:
    """Send requests of two tenants of different weight forever, after parking one request."""
    async with Client.connect(url, model=MODEL_NAME) as client:
        for tenant, (weight, _) in TENANTS.items():
            await client.configure_tenant(tenant, TenantPolicy(weight=weight))
        await park_one(client, url)
        loops = (ask_forever(client, tenant) for tenant, (_, num) in TENANTS.items() for _ in range(num))
        await asyncio.gather(*loops)


async def ask_forever(client: Client, tenant: str) -> None:
    """Send one request after the other."""
    while True:
        question = random.choice(demo_questions(16, seed=0))
        params = SamplingParams(temperature=1.0, max_tokens=300, min_tokens=random.randint(50, 250))
        async for _ in client.stream(question.prompt, params, tenant=tenant):
            pass


async def park_one(client: Client, url: str) -> None:
    """Park a request, as if it had killed each engine that ran it.

    The engine is invented, because the demo's engine would have to die several times. Its claim follows the request on
    the same connection. If the worker claims the request first, it answers it, and the next request is tried.
    """
    connection = make_commands(url, None, Keys())
    broker = Broker(connection, Keys().model(MODEL_NAME))
    card = await client.get_model_config(MODEL_NAME)
    for number in itertools.count(1):
        request_id = f"poison-{number}"
        request = build_request("a poison request", SamplingParams(), card=card, options={"request_id": request_id})
        await asyncio.gather(
            broker.enqueue(request_id, encode_request(request), result_ttl_ms=3_600_000),
            broker.claim(_CAUSE.engine_id, EngineCapacity(max_num_seqs=1)),
        )
        _, num_parked = await broker.reclaim(_CAUSE.engine_id, _CAUSE, is_external=False, max_deliveries=1)
        if num_parked:
            break
    await connection.close()
