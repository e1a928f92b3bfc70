"""What was counted, as pictures with a table behind each."""

from __future__ import annotations

import pytest

from penstock.ops.views.charts import path_of
from penstock.shared.broker.series import STEPS_S, SeriesStore

from .conftest import Site


async def count(site: Site, model: str, amounts: dict[str, int]) -> None:
    """As an engine of the model does, a step ago: the one under way is not drawn."""
    keys = site.keys.model(model)
    await SeriesStore(site.connection, keys).add(f"engine of {model}", 1, amounts)
    for step_s in STEPS_S:
        now = int((await site.connection.execute("TIME"))[0])
        start = now - now % step_s
        if await site.connection.execute("EXISTS", keys.series(step_s, start)):
            await site.connection.execute("RENAME", keys.series(step_s, start), keys.series(step_s, start - step_s))


COUNTED = {
    "tokens_in": 36_000,
    "tokens_out": 72_000,
    "ended:finished": 3,
    "ended:failed": 1,
    "ended:parked": 1,
    "time_to_first_token_s:0.1": 98,
    "time_to_first_token_s:0.5": 2,
}


@pytest.mark.parametrize(("span", "step_s"), [("1h", 60), ("24h", 600), ("7d", 3600)])
async def test_the_queue_page_shows_series_as_charts_and_tables(span: str, step_s: int, site: Site) -> None:
    await count(site, "m", COUNTED)
    visitor = await site.visitor()
    series = (await visitor.get(f"/queue.json?model=m&span={span}")).json()["facts"]["series"]
    (tokens,) = series["Tokens per second"]
    assert (tokens["tokens_in_per_s"], tokens["tokens_out_per_s"]) == (36_000 / step_s, 72_000 / step_s)
    (ended,) = series["Requests ended"]
    assert (ended["finished"], ended["cancelled"], ended["failed"]) == (3, 0, 2)
    (first,) = series["Time to the first token"]
    assert (first["ttft_p50_s"], first["ttft_p99_s"]) == (0.1, 0.5)
    assert series["Time between tokens"] == []
    html = (await visitor.get(f"/queue?model=m&span={span}")).text
    assert html.count("<svg") == html.count("<details>") == 3, "one for each that has counted"
    assert '<td class="n">100 ms</td><td class="n">500 ms</td>' in html


async def test_the_overview_adds_the_models_up(site: Site) -> None:
    await site.register("n")
    for model in ("m", "n"):
        await count(site, model, COUNTED)
    html = (await (await site.visitor()).get("/")).text
    assert '<td class="n">1 200</td><td class="n">2 400</td>' in html
    assert '<td class="n">6</td><td class="n">0</td><td class="n">4</td>' in html


async def test_nothing_counted_and_a_wrong_span_are_sentences(site: Site) -> None:
    visitor = await site.visitor()
    assert "Nothing was counted in the last 24h." in (await visitor.get("/?span=24h")).text
    refused = await visitor.get("/?span=1y")
    assert refused.status_code == 400
    assert "span must be one of 1h, 24h, 7d" in refused.text


def test_a_line_is_broken_where_nothing_is_known() -> None:
    assert path_of([0.0, 10.0, None, 5.0, None], 10.0) == "M0.0 30.0h0L25.0 0.0M75.0 15.0h0"
    assert path_of([None, None], 0.0) == ""
