"""The mutations, and the tests that must notice each of them."""

from __future__ import annotations

from .mutation import READER_TESTS, SCRIPTS, Mutation, broker_tests
from .scripts import SCRIPT_MUTATIONS

PUBLISHER_TESTS = ("tests/integration/serving/test_publisher.py", "tests/unit/serving/test_generation.py")
CLAIMING_TESTS = ("tests/integration/serving/test_claiming.py",)

MUTATIONS = (
    *SCRIPT_MUTATIONS,
    # Publisher.
    Mutation(
        "the publisher merges deltas of two epochs",
        "worker/serving/publisher.py",
        "if pending is not None and pending.epoch == epoch:",
        "if pending is not None:",
        PUBLISHER_TESTS,
    ),
    Mutation(
        "the publisher forgets the delta before",
        "worker/serving/publisher.py",
        "            pending.delta.extend(delta)\n            delta = pending.delta\n",
        "            pass\n",
        PUBLISHER_TESTS,
    ),
    Mutation(
        "a flush returns before the write",
        "worker/serving/publisher.py",
        "        self._flushes.append(flushed)\n        await flushed",
        "        self._flushes.append(flushed)",
        (*PUBLISHER_TESTS, *CLAIMING_TESTS),
    ),
    Mutation(
        "the scheduled tokens of a lost claim are written",
        "worker/serving/publisher.py",
        "self._scheduled.pop(request_id, None)",
        "self._scheduled.get(request_id)",
        PUBLISHER_TESTS,
    ),
    Mutation(
        "a stale claim is not reported",
        "worker/serving/publisher.py",
        "self._on_stale(request_id, epochs[request_id])",
        "pass",
        PUBLISHER_TESTS,
    ),
    # Claiming.
    Mutation(
        "unknown claims are checked only after a failure",
        "worker/serving/claiming.py",
        "if (part.may_hold_unknown or is_due) and not part.is_away:",
        "if part.may_hold_unknown and not part.is_away:",
        CLAIMING_TESTS,
    ),
    Mutation(
        "unknown claims are checked before ends are written",
        "worker/serving/claiming.py",
        "                await part.publisher.flush()\n",
        "",
        CLAIMING_TESTS,
    ),
    # Reader.
    Mutation(
        "messages that arrive while the log is read are dropped",
        "producer/requests/reader.py",
        "            self._held.append(delta)\n",
        "            pass\n",
        READER_TESTS,
    ),
    Mutation(
        "held messages are not delivered after the log is read",
        "producer/requests/reader.py",
        "        for delta in arrived:\n            self._offer(delta)\n",
        "",
        READER_TESTS,
    ),
    Mutation(
        "a failed read of the log is not repeated",
        "producer/requests/reader.py",
        "                except BaseException:\n                    self._must_read_log = True",
        "                except BaseException:\n                    self._must_read_log = False",
        READER_TESTS,
    ),
    Mutation(
        "an end that comes after tokens were lost is ignored",
        "producer/requests/taken_records.py",
        "return delta.finished or delta.index == self.next_index or delta.next_index > self.next_index",
        "return delta.index == self.next_index or delta.next_index > self.next_index",
        READER_TESTS,
    ),
    Mutation(
        "a gap is ignored",
        "producer/requests/taken_records.py",
        "return delta.finished or delta.index == self.next_index or delta.next_index > self.next_index",
        "return delta.finished or delta.index == self.next_index",
        READER_TESTS,
    ),
    Mutation(
        "tokens that came again as others are not noticed",
        "producer/requests/taken_records.py",
        "if delivered == delta.token_ids[: len(delivered)]:",
        "if True:",
        READER_TESTS,
    ),
    Mutation(
        "a lost log is not read from its beginning",
        "producer/requests/taken_records.py",
        "self.num_records, self._num_log_chars, self._last = 0, 0, None",
        "self._last = None",
        READER_TESTS,
    ),
    Mutation(
        "a reader does not read the log when its subscription is confirmed again",
        "producer/requests/reader.py",
        "self._broker.keys.output(self._request_id), self._on_message, self.catch_up",
        "self._broker.keys.output(self._request_id), self._on_message, lambda: None",
        READER_TESTS,
    ),
    Mutation(
        "a lost request leaves its reader waiting",
        "producer/requests/reader.py",
        "if not was_known and not records and not self._taken.ended:",
        "if False:",
        READER_TESTS,
    ),
    Mutation(
        "readers that are behind their log are not woken",
        "producer/requests/log_checks.py",
        "            readers[place].catch_up()",
        "            pass",
        READER_TESTS,
    ),
    # Webhooks.
    Mutation(
        "the event of a webhook is made of the log's first record",
        SCRIPTS + "parts/life.lua",
        "'record:' .. id, redis.call('LINDEX', prefix .. 'log:' .. id, -1)}",
        "'record:' .. id, redis.call('LINDEX', prefix .. 'log:' .. id, 0)}",
        (*broker_tests("test_states.py"), "tests/integration/jobs"),
    ),
)
