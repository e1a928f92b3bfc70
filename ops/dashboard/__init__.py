"""``penstock dashboard``: queues, engines and requests in a browser, as an ASGI application that others can mount.

    app.mount("/penstock", dashboard(redis_url="redis://localhost:6379", access=who_is_it))

Needs the extra ``dashboard``.
"""

from ...producer.control.secret_keys import Role
from ..views.access import Access
from .access import HeaderAccess, KeyAccess, Resolve, everybody
from .app import dashboard

__all__ = ["Access", "HeaderAccess", "KeyAccess", "Resolve", "Role", "dashboard", "everybody"]
