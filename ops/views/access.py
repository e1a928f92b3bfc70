"""What one who looks may see and do."""

from __future__ import annotations

from dataclasses import dataclass

from ...producer.operator_keys import Role


@dataclass(frozen=True)
class Access:
    """One who is let in.

    Args:
        user: stands in the audit.
        role: what they may do.
        sees_contents: whether they see prompts and outputs.
    """

    user: str
    role: Role = Role.VIEWER
    sees_contents: bool = False
