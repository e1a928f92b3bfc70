"""Two owners in one log are recognised by their writer, not by their content."""

from __future__ import annotations

import pytest

from penstock.ops.lab.chaos.owners import Owners


@pytest.fixture
def owners() -> Owners:
    """A holds request r under epoch 10 and has written tokens 0 to 2."""
    owners = Owners()
    owners.claimed("r", 10, "A")
    owners.wrote("r", 10, 0, 3)
    return owners


def test_successive_owners_are_no_violation(owners: Owners) -> None:
    owners.claimed("r", 20, "B")
    owners.wrote("r", 20, 3, 4)
    owners.wrote("r", 20, 4, 4)
    owners.claimed("other", 15, "A")
    owners.wrote("other", 15, 0, 1)
    assert (owners.harms, owners.num_records, owners.num_moved) == ([], 4, 1)


def test_an_owner_that_was_followed_may_not_write(owners: Owners) -> None:
    """Neither before the next one has written nor after."""
    owners.claimed("r", 20, "B")
    owners.wrote("r", 10, 3, 5)
    assert owners.harms == ["r: tokens 3 to 4 were written by A (epoch 10) after the request had gone to B (epoch 20)"]


def test_an_unobserved_claim_shows_by_its_owners_write(owners: Owners) -> None:
    owners.wrote("r", 20, 3, 4)
    owners.wrote("r", 10, 4, 4)
    assert owners.harms == [
        "r: the end after token 3 was written by A (epoch 10) after the request had gone to "
        "an engine whose claim was not seen (epoch 20)"
    ]


def test_no_token_is_written_twice(owners: Owners) -> None:
    owners.claimed("r", 20, "B")
    owners.wrote("r", 20, 2, 4)
    assert owners.harms == [
        "r: tokens 2 to 3 were written by B (epoch 20), though A (epoch 10) had written up to token 2"
    ]


def test_an_epoch_is_issued_once_even_after_data_loss(owners: Owners) -> None:
    owners.forget()
    owners.claimed("r", 10, "B")
    assert owners.harms == ["r: epoch 10 was given to A and again to B"]


def test_epochs_rise(owners: Owners) -> None:
    owners.claimed("r", 9, "B")
    assert owners.harms == ["r: B was given epoch 9, not above that of A (epoch 10)"]


def test_after_losing_the_next_owner_a_server_may_accept_the_previous_one(owners: Owners) -> None:
    owners.claimed("r", 20, "B")
    owners.wrote("r", 20, 3, 9)
    owners.forget()
    owners.wrote("r", 10, 3, 4)
    assert owners.harms == []
