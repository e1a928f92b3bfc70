"""The mutations, and the tests that must notice each of them."""

from __future__ import annotations

from dataclasses import dataclass

SCRIPTS = "shared/broker/scripts/"


def broker_tests(likely: str) -> tuple[str, ...]:
    """Return the broker's tests, first those of the file or folder ``likely``, which notice a defect soonest."""
    return (f"tests/integration/broker/{likely}", "tests/integration/broker")


PUBLISHER_TESTS = ("tests/integration/serving/test_publisher.py", "tests/unit/serving/test_generation.py")
READER_TESTS = (
    "tests/unit/producer/test_taken_records.py",
    "tests/integration/client/reading",
    "tests/integration/client/test_client.py",
    "tests/integration/client/connections/test_redis_away.py",
)
CLAIMING_TESTS = ("tests/integration/serving/test_claiming.py",)


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


MUTATIONS = (
    # Fencing: a stale owner is refused.
    Mutation(
        "append accepts the record of a stale owner",
        SCRIPTS + "engines/append.lua",
        "if epoch ~= ARGV[i + 1] or state ~= 'claimed' then",
        "if state ~= 'claimed' then",
        broker_tests("contract"),
    ),
    Mutation(
        "append writes to a request that is not claimed",
        SCRIPTS + "engines/append.lua",
        "if epoch ~= ARGV[i + 1] or state ~= 'claimed' then",
        "if epoch ~= ARGV[i + 1] then",
        broker_tests("claims/test_wakes.py"),
    ),
    Mutation(
        "append writes a record that begins beyond the log",
        SCRIPTS + "engines/append.lua",
        "elseif index == logged then",
        "elseif tonumber(index) >= tonumber(logged) then",
        broker_tests("damage/test_damage.py"),
    ),
    Mutation(
        "append calls a repeated record refused",
        SCRIPTS + "engines/append.lua",
        "and tonumber(next_index) <= count and 2 or 0",
        "and tonumber(next_index) < count and 2 or 0",
        broker_tests("contract"),
    ),
    Mutation(
        "finish accepts the end from a stale owner",
        SCRIPTS + "engines/finish.lua",
        "if request.epoch ~= epoch then return 0 end",
        "",
        broker_tests("test_deadlines.py"),
    ),
    Mutation(
        "finish writes an end behind a gap",
        SCRIPTS + "engines/finish.lua",
        "or index ~= whole(request.count) or",
        "or",
        broker_tests("test_scripts.py"),
    ),
    Mutation(
        "finish calls a repeated end refused",
        SCRIPTS + "engines/finish.lua",
        "return request.state == state and 2 or 0",
        "return 0",
        broker_tests("contract"),
    ),
    Mutation(
        "release hands back the claim of another owner",
        SCRIPTS + "engines/release.lua",
        "if request.epoch == ARGV[i + 1] and request.state == 'claimed' then",
        "if request.state == 'claimed' then",
        broker_tests("contract"),
    ),
    Mutation(
        "renew reports no stale claim",
        SCRIPTS + "engines/renew.lua",
        "if epoch ~= ARGV[i + 1] or state ~= 'claimed' then",
        "if state == nil then",
        broker_tests("contract"),
    ),
    Mutation(
        "an end from outside leaves the old owner's epoch valid",
        SCRIPTS + "parts/life.lua",
        "  redis.call('HINCRBY', key, 'epoch', 1)\n  local delta",
        "  local delta",
        broker_tests("test_deadlines.py"),
    ),
    Mutation(
        "a claim repeats an epoch after the record of the last claim is lost",
        "shared/redis_access/clock.lua",
        "return time_us > (last or 0) and time_us or last + 1 + time_us % 1000000",
        "return (last or 0) + 1",
        broker_tests("contract"),
    ),
    Mutation(
        "the wave carries the old epoch",
        SCRIPTS + "engines/claim.lua",
        "wave[#wave + 1] = {id, request.payload, epoch, count,",
        "wave[#wave + 1] = {id, request.payload, tonumber(request.epoch), count,",
        broker_tests("claims/test_admission.py"),
    ),
    # Nothing is lost or repeated.
    Mutation(
        "a record is logged and not published",
        SCRIPTS + "parts/lib.lua",
        "  redis.call('PUBLISH', prefix .. 'output:' .. id, record)\n",
        "",
        (*broker_tests("test_scripts.py"), *READER_TESTS),
    ),
    Mutation(
        "a record is published and not logged",
        SCRIPTS + "parts/lib.lua",
        "if not attempt('RPUSH', prefix .. 'log:' .. id, record) then return false end",
        "if not attempt('LLEN', prefix .. 'log:' .. id) then return false end",
        broker_tests("claims/test_waves.py"),
    ),
    Mutation(
        "the payload is not kept when a request is claimed",
        SCRIPTS + "engines/claim.lua",
        "redis.call('SET', prefix .. 'payload:' .. request.id, request.payload)",
        "",
        broker_tests("claims/test_bands.py"),
    ),
    Mutation(
        "the payload outlives the request",
        SCRIPTS + "parts/life.lua",
        "ends.payloads[#ends.payloads + 1] = prefix .. 'payload:' .. id",
        "",
        broker_tests("contract"),
    ),
    Mutation(
        "a request that ends stays among the claims of its engine",
        SCRIPTS + "parts/life.lua",
        "if request.engine then remove_later('HDEL', prefix .. 'claims:' .. request.engine, id) end",
        "",
        broker_tests("contract"),
    ),
    Mutation(
        "a request that is handed back stays among the claims of its engine",
        SCRIPTS + "parts/life.lua",
        "  leave_claims(prefix, request.engine, id)\n  move(key, 'claimed', 'queued', 'line', line,",
        "  move(key, 'claimed', 'queued', 'line', line,",
        broker_tests("contract"),
    ),
    Mutation(
        "a log never expires",
        SCRIPTS + "parts/life.lua",
        "redis.call('PEXPIRE', prefix .. 'log:' .. id, request.ttl)",
        "",
        broker_tests("contract"),
    ),
    Mutation(
        "enqueue accepts a known request id again",
        SCRIPTS + "callers/enqueue.lua",
        "if known_state then\n",
        "if known_state and false then\n",
        broker_tests("test_scripts.py"),
    ),
    Mutation(
        "enqueue accepts one id twice within a call",
        SCRIPTS + "callers/enqueue.lua",
        "if twin then known_state, known_call = 'queued', twin[6] end",
        "",
        broker_tests("test_many_at_once.py"),
    ),
    Mutation(
        "enqueue does not recognise its own repeated call",
        SCRIPTS + "callers/enqueue.lua",
        "if call ~= '' and known_call == call then return 'new' end",
        "",
        broker_tests("test_deaths.py"),
    ),
    Mutation(
        "a known request id attaches whoever asks for it",
        SCRIPTS + "callers/enqueue.lua",
        "if known_tenant and known_tenant ~= tenant then return 'tenant' end",
        "",
        ("tests/integration/client/test_request_ids.py",),
    ),
    Mutation(
        "a known request id attaches whatever is asked for",
        SCRIPTS + "callers/enqueue.lua",
        "if known_digest and known_digest ~= digest then return CONTENT[i] or 'content' end",
        "",
        ("tests/integration/client/test_request_ids.py",),
    ),
    Mutation(
        "a cancelled request goes on in its engine",
        SCRIPTS + "parts/life.lua",
        "  end_request(prefix, id, state, state)\n  tell_engine(prefix, engine, id)",
        "  end_request(prefix, id, state, state)",
        broker_tests("test_scripts.py"),
    ),
    # Deaths.
    Mutation(
        "a reaper returns after a gap and takes everybody for dead",
        SCRIPTS + "reaping/reap.lua",
        "local is_gap = not (checked_at and not_before) or time_ms - checked_at > tonumber(ARGV[4])",
        "local is_gap = not (checked_at and not_before)",
        broker_tests("test_deaths.py"),
    ),
    Mutation(
        "a lease that was set by a clock that was ahead counts as it stands",
        SCRIPTS + "parts/lib.lua",
        "if longest_ms > 0 then",
        "if false then",
        broker_tests("test_clock.py"),
    ),
    Mutation(
        "a timeout that was set by a clock that was ahead counts as it stands",
        SCRIPTS + "reaping/reap.lua",
        "if not cut_due or cut_due == due then return end",
        "do return end",
        broker_tests("test_clock.py"),
    ),
    Mutation(
        "the requests of a client that still listens are cancelled",
        SCRIPTS + "reaping/reap.lua",
        "[2] > 0 then\n      is_listening = true",
        "[2] > 1e9 then\n      is_listening = true",
        broker_tests("test_deaths.py"),
    ),
    Mutation(
        "a request that kills its engines is never parked",
        SCRIPTS + "parts/death.lua",
        "if deaths >= max_deliveries and is_alone then",
        "if false then",
        broker_tests("test_deaths.py"),
    ),
    Mutation(
        "a request is parked for a death in company",
        SCRIPTS + "parts/death.lua",
        "if deaths >= max_deliveries and is_alone then",
        "if deaths >= max_deliveries then",
        broker_tests("test_deaths.py"),
    ),
    Mutation(
        "deaths count although the request made progress alone",
        SCRIPTS + "parts/death.lua",
        "    deaths = 0\n  end\n  deaths = deaths + 1",
        "  end\n  deaths = deaths + 1",
        broker_tests("test_deaths.py"),
    ),
    Mutation(
        "reclaim takes a claim that has moved to another engine",
        SCRIPTS + "parts/death.lua",
        "elseif request.epoch == claims[i + 1] and request.state == 'claimed' then",
        "elseif request.state == 'claimed' then",
        broker_tests("test_deaths.py"),
    ),
    Mutation(
        "an engine that died keeps its lease",
        SCRIPTS + "parts/death.lua",
        "redis.call('ZREM', prefix .. 'leases', engine)",
        "",
        broker_tests("test_deaths.py"),
    ),
    Mutation(
        "what runs past its deadline is ended without grace",
        SCRIPTS + "parts/life.lua",
        "(state ~= 'claimed' or time_ms - tonumber(due[i + 1]) >= grace_ms)",
        "true",
        broker_tests("test_deadlines.py"),
    ),
    # Devices that may wake a model.
    Mutation(
        "a model that only sleeps is not served",
        SCRIPTS + "parts/lib.lua",
        "{'leases', 'homes'}",
        "{'leases'}",
        broker_tests("test_homes.py"),
    ),
    Mutation(
        "two homes wake a model for one engine",
        SCRIPTS + "engines/grant.lua",
        "if num_engines >= tonumber(ARGV[5]) then return {'elsewhere', 0} end",
        "",
        broker_tests("test_homes.py"),
    ),
    Mutation(
        "a home that died still serves its model",
        SCRIPTS + "parts/homes.lua",
        "  drop_homes(prefix, expired(prefix, 'homes'))\n",
        "",
        broker_tests("test_homes.py"),
    ),
    Mutation(
        "requests that an engine returned wake no model",
        SCRIPTS + "parts/homes.lua",
        "local oldest = oldest_returned(prefix)",
        "local oldest = {}",
        broker_tests("test_homes.py"),
    ),
    # Growing input.
    Mutation(
        "segments are not charged to the tenant's share",
        SCRIPTS + "engines/end_segment.lua",
        "if extra ~= 0 then charge(prefix, request.band, request.tenant, extra) end",
        "",
        broker_tests("test_input.py"),
    ),
    Mutation(
        "segments are not charged to the tenant's quota",
        SCRIPTS + "engines/end_segment.lua",
        "local extra = use_computed(prefix, request.tenant, computed, charged, whole(request.charged_at) or now_ms())",
        "local extra = computed - charged",
        broker_tests("test_input.py"),
    ),
    Mutation(
        "the bytes of chunks are not added up",
        SCRIPTS + "callers/extend.lua",
        "'chunks', num_chunks + 1, 'input_bytes', num_bytes)",
        "'chunks', num_chunks + 1, 'input_bytes', #chunk)",
        broker_tests("test_input.py"),
    ),
    Mutation(
        "a chunk is added twice by a repeated call",
        SCRIPTS + "callers/extend.lua",
        "if number < num_chunks then",
        "if number < 0 then",
        broker_tests("test_input.py"),
    ),
    Mutation(
        "a segment with more input waits for input",
        SCRIPTS + "engines/end_segment.lua",
        "if number + 1 < tonumber(request.chunks) then",
        "if false then",
        broker_tests("test_input.py"),
    ),
    # Sharing.
    Mutation(
        "what an ended request did not use is not given back to its tenant",
        SCRIPTS + "parts/settling.lua",
        "effects.extra[band] = (effects.extra[band] or 0) + extra",
        "",
        broker_tests("claims/test_fairness.py"),
    ),
    Mutation(
        "a weight does not count",
        SCRIPTS + "engines/claim.lua",
        "local after, clock = turn.time + tokens / policy.weight,",
        "local after, clock = turn.time + tokens,",
        broker_tests("claims/test_fairness.py"),
    ),
    Mutation(
        "lower bands never age",
        SCRIPTS + "parts/turns.lua",
        "if head and now_ms() - tonumber(head) >= ageing_ms * (lower - level) then return true end",
        "",
        broker_tests("claims/test_bands.py"),
    ),
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
