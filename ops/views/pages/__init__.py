"""The pages and their actions, a module for each page. Its template has the same name."""

from ..page import Action, Page
from . import (
    audit,
    batches,
    dead,
    devices,
    engines,
    operators,
    overview,
    queue,
    request,
    requests,
    runbook,
    series,
    system,
    usage,
    webhooks,
)

_SECTIONS = (
    overview.SECTION,
    queue.SECTION,
    requests.SECTION,
    request.SECTION,
    engines.SECTION,
    devices.SECTION,
    dead.SECTION,
    batches.SECTION,
    webhooks.SECTION,
    usage.SECTION,
    runbook.SECTION,
    series.SECTION,
    system.SECTION,
    audit.SECTION,
    operators.SECTION,
)
PAGES: tuple[Page, ...] = tuple(page for section in _SECTIONS for page in section.pages)
ACTIONS: tuple[Action, ...] = tuple(action for section in _SECTIONS for action in section.actions)
