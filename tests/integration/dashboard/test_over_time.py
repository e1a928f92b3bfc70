"""What was counted, as pictures with a table behind each."""

from __future__ import annotations

import csv
import io
import re

import pytest

from penstock.ops.views.charts import nice_limit, path_of
from penstock.shared.broker.series import STEPS_S, SeriesStore
from penstock.shared.stats import EngineStats, Histogram

from .conftest import Site


async def count(site: Site, model: str, amounts: dict[str, int]) -> None:
    """Count as an engine of the model does, a step ago: the one under way is not drawn."""
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
    *gap, row = (await visitor.get(f"/queue.json?model=m&span={span}")).json()["facts"]["series"]
    assert (row["tokens_in_per_s"], row["tokens_out_per_s"]) == (36_000 / step_s, 72_000 / step_s)
    assert (row["finished"], row["cancelled"], row["failed"]) == (3, 0, 2)
    assert (row["ttft_p50_s"], row["ttft_p99_s"], row["itl_p50_s"]) == (0.1, 0.5, None)
    assert {one["tokens_out_per_s"] for one in gap} == {None}, "nothing counted there: unknown, not 0"
    html = (await visitor.get(f"/queue?model=m&span={span}")).text
    assert html.count('<svg class="lines"') == html.count("<details>") == 3, "one for each that has counted"
    assert '<td class="n">100 ms</td><td class="n">500 ms</td>' in html
    for axis in ("<li>500 ms</li><li>250 ms</li><li>0 ms</li>", '<text x="'):
        assert axis in html


async def test_series_are_compared_with_the_period_before_and_exported(site: Site) -> None:
    await count(site, "m", COUNTED)
    visitor = await site.visitor()
    html = (await visitor.get("/queue?model=m&compare=1&q=a")).text
    assert "prompt before" in html
    assert '/queue?model=m&amp;q=a&amp;span=24h&amp;compare=1"' in html, "another span keeps the other choices"
    assert 'href="/series.csv?model=m&amp;span=1h&amp;compare=1"' in html
    rows = list(csv.DictReader(io.StringIO((await visitor.get("/series.csv?model=m&span=1h&compare=1")).text)))
    labels = re.findall('<th scope="col">([^<]*)</th>', (await visitor.get("/series?model=m&span=1h&compare=1")).text)
    assert labels[0] == "From (UTC)"
    assert {"Tokens in/s", "Tokens in/s before", "TTFT p50 (s)", "ITL p99 (s) before", "Waiting"} <= set(labels)
    assert float(rows[-1]["tokens_out_per_s"]) == 1200
    assert (rows[0]["tokens_out_per_s"], rows[-1]["tokens_out_per_s_before"]) == ("", "")


async def test_latencies_of_the_overview_are_those_of_the_last_minutes(site: Site) -> None:
    histogram = Histogram((0.5,), [9, 0], 1.0)
    await site.register(stats=EngineStats(time_to_first_token_s=histogram))
    visitor = await site.visitor()
    (row,) = (await visitor.get("/overview.json")).json()["rows"]
    assert (row["ttft_p50_s"], row["ttft_p99_s"]) == (None, None), "the engine's former requests do not count"
    await count(site, "m", COUNTED)
    (row,) = (await (await site.visitor()).get("/overview.json")).json()["rows"]
    assert (row["ttft_p50_s"], row["ttft_p99_s"]) == (0.1, 0.5)


@pytest.mark.parametrize(("value", "limit"), [(0, 1), (0.5, 0.5), (0.013, 0.02), (1, 1), (311, 500), (999, 1000)])
def test_an_axis_ends_at_a_round_number(value: float, limit: float) -> None:
    assert nice_limit(value) == pytest.approx(limit)


async def test_the_overview_adds_the_models_up(site: Site) -> None:
    await site.register("n")
    for model in ("m", "n"):
        await count(site, model, COUNTED)
    html = (await (await site.visitor()).get("/")).text
    assert '<td class="n">1\u202f200</td><td class="n">2\u202f400</td>' in html
    assert '<td class="n">6</td><td class="n">0</td><td class="n">4</td>' in html


async def test_nothing_counted_and_a_wrong_span_are_sentences(site: Site) -> None:
    visitor = await site.visitor()
    assert "Nothing was counted in the last 24h." in (await visitor.get("/?span=24h")).text
    refused = await visitor.get("/?span=1y")
    assert refused.status_code == 400
    assert "span must be one of 1h, 24h, 7d" in refused.text


def test_a_line_is_broken_where_nothing_is_known() -> None:
    assert path_of([0.0, 10.0, None, 5.0, None], 10.0) == "M0.0 30.0L25.0 0.0M74.5 15.0h1"
    assert path_of([None, None], 0.0) == ""
