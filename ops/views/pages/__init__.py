"""The pages: a module for each, with what it reads and what can be done there. Its template has the same name."""

from ..page import Action, Page
from . import audit, batches, dead, engines, operators, overview, queue, request, requests, system, webhooks

_ROOMS = (
    overview.ROOM,
    queue.ROOM,
    requests.ROOM,
    request.ROOM,
    engines.ROOM,
    dead.ROOM,
    batches.ROOM,
    webhooks.ROOM,
    system.ROOM,
    audit.ROOM,
    operators.ROOM,
)
PAGES: tuple[Page, ...] = tuple(page for room in _ROOMS for page in room.pages)
ACTIONS: tuple[Action, ...] = tuple(action for room in _ROOMS for action in room.actions)
