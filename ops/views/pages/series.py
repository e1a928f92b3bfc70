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
    return {"rows": rows_of(await read_charts(snapshot, models, params))}


SECTION = PageSection(
    (Page("series", "/series", "Series · {model}", _read_series, live=False, query=("model", *CHART_QUERY)),)
)
