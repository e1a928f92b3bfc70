"""A mutation: a deliberate defect, and the tests that must notice it."""

from __future__ import annotations

from dataclasses import dataclass

SCRIPTS = "shared/broker/scripts/"


def broker_tests(likely: str) -> tuple[str, ...]:
    """Return the broker's tests, first those of the file or folder ``likely``, which notice a defect soonest."""
    return (f"tests/integration/broker/{likely}", "tests/integration/broker")


READER_TESTS = (
    "tests/unit/producer/test_taken_records.py",
    "tests/integration/client/reading",
    "tests/integration/client/test_client.py",
    "tests/integration/client/connections/test_redis_away.py",
)


@dataclass(frozen=True)
class Mutation:
    """A deliberate defect: ``old`` occurs exactly once in ``file`` and is replaced by ``new``.

    Args:
        defect: what the changed code does wrong, as the subject line of a bug report.
        tests: files or folders of tests that are run one after another, until a test fails.
        equivalent: why no test can notice it, if none can; empty otherwise.
    """

    defect: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    equivalent: str = ""

    def apply(self, source: str) -> str:
        """Return ``source`` with the defect in it.

        Raises:
            ValueError: ``old`` does not occur exactly once.
        """
        if source.count(self.old) != 1:
            raise ValueError(f"{self.file}: {self.old!r} occurs {source.count(self.old)} times; correct the table")
        return source.replace(self.old, self.new)
