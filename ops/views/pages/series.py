"""The values of all charts in one table, for CSV and JSON."""

from __future__ import annotations

from ..access import Access
from ..charts import CHART_QUERY, read_charts, rows_of
from ..page import Page, PageSection, Params, View
from ..source import PageSnapshot


async def _read_series(snapshot: PageSnapshot, params: Params, _: Access) -> View:
    models = [params["model"]] if params.get("model") else list(await snapshot.models())
    for model in models:
        await snapshot.check_model(model)
    rows = rows_of(await read_charts(snapshot, models, params))
    return {"rows": rows, "labels": {name: _label(name) for name in rows[0] if name != "from"} if rows else {}}


def _label(name: str) -> str:
    """Return the heading of a column: "TTFT p50 (s)", "Tokens out/s"."""
    column = name.removesuffix("_before")
    words = column.replace("_per_s", "/s").replace("ttft", "TTFT").replace("itl", "ITL").replace("_utc", " (UTC)")
    words = f"{words.removesuffix('_s')} (s)" if words.endswith("_s") else words
    return (words[0].upper() + words[1:]).replace("_", " ") + (" before" if column != name else "")


SECTION = PageSection(
    (Page("series", "/series", "Series · {model}", _read_series, live=False, query=("model", *CHART_QUERY)),)
)
