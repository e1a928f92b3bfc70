"""A reader of a log that is lost and grows again, cut otherwise: each token and each character once, in order."""

from __future__ import annotations

import random

import pytest

from penstock.producer.requests.taken_records import TakenRecords
from penstock.shared.errors import OutputChangedError
from penstock.shared.messages.deltas import Delta
from penstock.shared.messages.outcome import FinishReason

NUM_TOKENS = 24
# Some tokens are a part of a character, some several.
PIECES = ["", "é", "ab", "", "", "日", "c", "déf"]
TEXTS = [PIECES[index % len(PIECES)] for index in range(NUM_TOKENS)]
WHOLE = "".join(TEXTS)


class Server:
    """A log that grows by records of any size; within a character its text may lag."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.log: list[Delta] = []

    @property
    def num_tokens(self) -> int:
        return self.log[-1].next_index if self.log else 0

    @property
    def has_ended(self) -> bool:
        return bool(self.log) and self.log[-1].finished

    def write(self) -> Delta:
        """Write a record, and publish it."""
        stop = self.rng.randint(self.num_tokens + 1, min(self.num_tokens + 5, NUM_TOKENS))
        is_last = stop == NUM_TOKENS
        num_told = sum(len(record.text) for record in self.log)
        length = len("".join(TEXTS[:stop]))
        text = WHOLE[num_told : length if is_last else max(num_told, length - self.rng.randint(0, 2))]
        token_ids = list(range(self.num_tokens, stop))
        reason = FinishReason.LENGTH if is_last else None
        self.log.append(Delta(index=self.num_tokens, token_ids=token_ids, text=text, finish_reason=reason))
        return self.log[-1]

    def lose(self) -> None:
        del self.log[self.rng.randint(0, len(self.log)) :]


# Far above the needs of any log.
MAX_LOOKS = 1000


class Reader:
    """The synchronous part of ``DeltaReader``."""

    def __init__(self) -> None:
        self.taken = TakenRecords("r")
        self.told: list[Delta] = []
        self.must_look = False
        self.num_looks = 0

    def hear(self, delta: Delta) -> None:
        if self.must_look or self.taken.ended:
            return
        if (item := self.taken.take_next(delta)) is not None:
            self.told.append(item)
        else:
            self.must_look = self.taken.is_beyond(delta)

    def look(self, log: list[Delta]) -> None:
        self.num_looks += 1
        assert self.num_looks < MAX_LOOKS, "it reads the log again and again"
        records = self.taken.take_log(log[self.taken.first_read :])
        self.must_look = records is None
        self.told += records or []


def live(rng: random.Random) -> Reader:
    """Run a generation whose records are lost to the reader, and to Redis, and which continues to its end."""
    server, reader = Server(rng), Reader()
    while not reader.taken.ended:
        if not server.has_ended:
            record = server.write()
            if rng.random() < 0.8:
                reader.hear(record)
        if rng.random() < 0.2:
            server.lose()
            reader.must_look = True  # as whoever has lost a connection, or is asked whether its request is known
        if (reader.must_look and rng.random() < 0.5) or server.has_ended:
            reader.look(server.log)
    return reader


@pytest.mark.parametrize("first_seed", range(0, 600, 100))
def test_each_token_and_character_is_delivered_once(first_seed: int) -> None:
    num_cut_texts = 0
    for seed in range(first_seed, first_seed + 100):
        reader = live(random.Random(seed))
        indexes = [delta.index + number for delta in reader.told for number in range(len(delta.token_ids))]
        assert indexes == list(range(NUM_TOKENS)), seed
        assert "".join(delta.text for delta in reader.told) == WHOLE, seed
        assert [delta.finished for delta in reader.told].count(True) == 1
        num_cut_texts += any(not delta.token_ids for delta in reader.told)
    # The log was sometimes further with its text than the deltas.
    assert num_cut_texts


def test_the_next_record_of_a_log_that_grows_again_is_taken_from_the_log() -> None:
    """It begins where the tokens end that were seen, and its text before them."""
    reader = Reader()
    reader.hear(Delta(index=0, token_ids=[0, 1, 2], text="abc"))
    reader.look([])
    log = [Delta(index=0, token_ids=[0, 1, 2], text="ab"), Delta(index=3, token_ids=[3], text="cd")]
    for record in log:
        reader.hear(record)
    assert reader.must_look
    reader.look(log)
    assert [delta.text for delta in reader.told] == ["abc", "d"]
    reader.hear(Delta(index=4, token_ids=[4], text="e"))
    assert [delta.text for delta in reader.told] == ["abc", "d", "e"], "it is known again"


def test_another_output_is_an_error_that_names_the_token() -> None:
    reader = Reader()
    reader.hear(Delta(index=0, token_ids=[5, 6], text="ab"))
    with pytest.raises(OutputChangedError, match="token 1 came again as 9 where it had been 6"):
        reader.hear(Delta(index=0, token_ids=[5, 9, 7], text="axc"))


def test_an_end_before_the_last_token_has_the_log_read() -> None:
    """Redis lost the last record, and the request was cancelled: its end is at an earlier token than the reader's."""
    reader = Reader()
    log = [Delta(index=0, token_ids=[5], text="a"), Delta(index=1, token_ids=[6], text="b")]
    for record in log:
        reader.hear(record)
    end = Delta(index=1, token_ids=[], finish_reason=FinishReason.CANCELLED)
    reader.hear(end)
    assert reader.must_look
    log[1:] = [end]
    while reader.must_look:
        reader.look(log)
    assert [delta.token_ids for delta in reader.told] == [[5], [6], []]
    assert reader.taken.ended


def test_a_record_after_a_gap_has_the_log_read() -> None:
    reader = Reader()
    log = [Delta(index=0, token_ids=[5], text="a"), Delta(index=1, token_ids=[6], text="b")]
    log.append(Delta(index=2, token_ids=[7], text="c"))
    reader.hear(log[0])
    reader.hear(log[2])
    assert reader.must_look
    reader.look(log)
    assert [delta.token_ids for delta in reader.told] == [[5], [6], [7]]
