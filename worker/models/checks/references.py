"""All results of a model itself that a forward is compared with."""

from __future__ import annotations

from dataclasses import dataclass

from ..forward import Forward
from .conformance import ReferenceRun, check_conformance
from .lengths import LoweredReference


@dataclass
class References:
    """Results of a model itself.

    Args:
        run: of two short sequences.
        lowered: of the same with lowered lengths; None if no request is affected by a length.
    """

    run: ReferenceRun
    lowered: LoweredReference | None

    def compare_with(self, forward: Forward, tolerance: float | None = None) -> float:
        """Compare them with the results of ``forward``; return the larger error. See ``check_conformance``.

        Raises:
            ModelLoadError: they differ by more than rounding.
        """
        error = check_conformance(forward, self.run, tolerance)
        return error if self.lowered is None else max(error, self.lowered.check(forward, tolerance))
