"""The option for the order of requests in an engine."""

from __future__ import annotations

from typing import Annotated

from ...shared.process.plugins import ORDERING_POLICIES, plugins_of
from ..options.option import Option
from ..options.readers import Choice, RefusedValueError

FIRST_COME_FIRST_SERVED = "fcfs"
SCHEDULING_POLICIES = (FIRST_COME_FIRST_SERVED, "priority")


class _Policy(Choice):
    """Reader of a policy of the project or of the operator. The latter is checked when an engine loads it."""

    def __init__(self) -> None:
        super().__init__(*SCHEDULING_POLICIES)
        self.metavar = "POLICY"
        self.kind += ", a plug-in's name, `MODULE:CLASS`"

    def check(self, value: str) -> None:
        if ":" in value or value in SCHEDULING_POLICIES:
            return
        installed = plugins_of(ORDERING_POLICIES)
        if value not in installed:
            names = ", ".join((*SCHEDULING_POLICIES, *installed))
            raise RefusedValueError(f"must be one of {names}, or MODULE:CLASS")


SchedulingPolicy = Annotated[
    str,
    Option(
        "order in which an engine runs requests, and the reverse order of preemption: arrival, lowest "
        "priority then arrival, or a custom policy",
        _Policy(),
        group="batch and memory",
    ),
]
