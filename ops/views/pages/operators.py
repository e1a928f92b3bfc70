"""Operators' keys and their roles."""

from __future__ import annotations

from ....producer.control.secret_keys import Role
from ....shared.errors import ValidationError
from ..access import Access
from ..page import Action, ActionContext, Page, PageSection, Params, View, field_of
from ..source import PageSnapshot


async def _read_operators(snapshot: PageSnapshot, _: Params, __: Access) -> View:
    records = await snapshot.source.operator_keys.list()
    fields = ("key_id", "name", "role", "sees_contents", "created_at")
    return {"rows": [{field: getattr(record, field) for field in fields} for record in records], "roles": list(Role)}


async def _create_operator(context: ActionContext) -> str:
    role = context.form.get("role", "")
    if role not in tuple(Role):
        raise ValidationError(f"role must be one of {', '.join(Role)}, got {role!r}")
    name, contents = field_of(context.form, "name"), bool(context.form.get("contents"))
    key, _ = await context.source.operator_keys.create(name, Role(role), sees_contents=contents)
    return f"the key of {name}, which cannot be shown again: {key}"


async def _revoke_operator(context: ActionContext) -> str:
    key_id = field_of(context.form, "id")
    existed = await context.source.operator_keys.revoke(key_id)
    return f"{key_id} is revoked" if existed else f"no key {key_id} exists"


SECTION = PageSection(
    pages=(
        Page(
            "operators",
            "/operators",
            "Keys and roles",
            _read_operators,
            nav="Keys and roles",
            live=False,
            role=Role.ADMIN,
        ),
    ),
    actions=(
        Action("/operators/create", Role.ADMIN, _create_operator, "operators", is_shown_once=True),
        Action("/operators/revoke", Role.ADMIN, _revoke_operator, "operators", confirm="id"),
    ),
)
