"""What an operator may see and do."""

from __future__ import annotations

from dataclasses import dataclass

from ...producer.control.secret_keys import Role


@dataclass(frozen=True)
class Access:
    """An operator who is allowed in.

    Args:
        user: name in the audit.
        role: what the user may do.
        sees_contents: whether the user may see prompts and outputs.
    """

    user: str
    role: Role = Role.VIEWER
    sees_contents: bool = False
