-- uses: death, homes, series
-- End requests that are past their deadline, reclaim the requests of engines whose lease has expired, and cancel the
-- requests of clients that have vanished. KEYS: leases. ARGV: prefix, max_deliveries, lease_ttl_ms, max_gap_ms, cause.
-- Call it several times per second, from any number of reapers. Returns a list of {kind, name, queued again or
-- cancelled, parked}, and whether to call it again immediately.
--
-- Leases expire by this server's clock, so time during which the server (or every reaper) was stopped must not count:
-- after a gap between two calls, no engine or client counts as dead before all had lease_ttl_ms to renew. A clock that
-- was set forward looks like such a gap. After it was set back, times in the future are cut (clock.lua).
local function cut_deadline(prefix, id, due)
  local request = fields_of(prefix .. 'request:' .. id, 'timeout', 'entry', 'tenant', 'band')
  local timeout = whole(request.timeout)
  local cut_due = timeout and marks.cut(due, timeout)
  if not cut_due or cut_due == due then return end
  redis.call('ZADD', prefix .. 'deadlines', cut_due, id)
  redis.call('HSET', prefix .. 'request:' .. id, 'deadline', cut_due)
  if request.entry and request.tenant and request.band then
    redis.call('ZADD', due_key(prefix, request.band, request.tenant), 'XX', cut_due, request.entry)
  end
end

-- Cut some deadlines, from a cursor on. Returns the next cursor, "0" at the end.
local function cut_deadlines(prefix, cursor)
  local next_cursor, due = unpack(redis.call('ZSCAN', prefix .. 'deadlines', cursor, 'COUNT', 500))
  for i = 1, #due, 2 do cut_deadline(prefix, due[i], tonumber(due[i + 1])) end
  return next_cursor
end

-- Sample the queue for its series: states that no counter has, and the ends that scripts count in "queue", by their
-- difference to the last sample. The first reaper of each SAMPLE_EVERY_MS does it.
local SAMPLE_EVERY_MS = 10000

local function sample(prefix, sampled_at)
  local time_ms, queue = now_ms(), prefix .. 'queue'
  if not marks.has_passed(whole(sampled_at), SAMPLE_EVERY_MS) then return end
  redis.call('HSET', prefix .. 'reaper', 'sampled_at', time_ms)
  local depth, tokens = waiting(prefix, queue)
  local sums = fields(queue, 'num_started', 'num_awaiting')
  local num_returned = redis.call('LLEN', prefix .. 'returned') + redis.call('LLEN', prefix .. 'suspects')
  local oldest_ms = 0
  for _, band in ipairs(queue_policy(prefix).bands) do
    local head = redis.call('ZRANGE', prefix .. 'heads:' .. band, 0, 0, 'WITHSCORES')[2]
    if head then oldest_ms = math.max(oldest_ms, time_ms - tonumber(head)) end
  end
  local amounts = {'samples', 1, 'waiting', depth + num_returned, 'waiting_tokens', tokens, 'running',
    math.max(0, count_of(sums.num_started) - num_returned), 'oldest_ms', oldest_ms,
    'engines', redis.call('ZCOUNT', prefix .. 'leases', time_ms, '+inf')}
  for state in pairs(ENDED) do
    local counts = fields(queue, 'ended:' .. state, 'ended_seen:' .. state)
    local num_ended = amount(counts['ended:' .. state])
    if num_ended > amount(counts['ended_seen:' .. state]) then
      amounts[#amounts + 1] = 'ended:' .. state
      amounts[#amounts + 1] = num_ended - amount(counts['ended_seen:' .. state])
      redis.call('HSET', queue, 'ended_seen:' .. state, num_ended)
    end
  end
  add_to_series(prefix, amounts, {})
end

local prefix, lease_ttl_ms = ARGV[1], tonumber(ARGV[3])
local RECOUNT_EVERY_MS, WAKE_EVERY_MS, MAX_WOKEN = 10000, 500, 8
local MAX_ENGINES, MAX_CLIENTS = 64, 256 -- a call must not block the server; with more, it is called again
local BLOCKED_MS = (WINDOW_S + 1) * 1000
local reaper, time_ms, reaped, is_more = prefix .. 'reaper', now_ms(), {}, 0
expire_due(prefix, 1000, 1000)
local last = fields(reaper, 'looked_at', 'not_before', 'recounted_at', 'woken_at', 'sampled_at', 'deadlines_from')
local checked_at, not_before = whole(last.looked_at), whole(last.not_before)
-- The first write, which a full Redis refuses, and so all that follows. (A first write that frees memory would be let
-- through, and so would all after it: engines that could not renew their leases would count as dead.)
redis.call('HSET', reaper, 'looked_at', time_ms)
local is_gap = not (checked_at and not_before) or time_ms - checked_at > tonumber(ARGV[4])
local is_set_back = checked_at and checked_at > time_ms + marks.MAX_LEAD_MS
if is_set_back then
  redis.call('HSET', reaper, 'set_back_at', time_ms)
  -- Forget the usage that was counted by the other clock. For tenants that wait for it do so now, since it may look
  -- valid later.
  for _, tenant in ipairs(redis.call('ZRANGE', prefix .. 'blocked', 0, marks.MAX_CUT)) do used(prefix, tenant) end
end
trim_events(prefix)
sample(prefix, last.sampled_at)

for _, kind in ipairs({'leases', 'clients'}) do marks.cut_leases(prefix, kind) end
marks.cut_all(prefix .. 'blocked', BLOCKED_MS)
for _, band in ipairs(queue_policy(prefix).bands) do marks.cut_all(prefix .. 'heads:' .. band, marks.MAX_LEAD_MS) end
-- Only the requests say which deadlines to cut, so read all of them, also after a gap, in which no reaper checked. The
-- cursor is stored between calls.
local cursor = (is_gap or is_set_back) and '0' or last.deadlines_from
if cursor then
  cursor = cut_deadlines(prefix, cursor)
  is_more = cursor ~= '0' and 1 or 0
  if is_more == 1 then redis.call('HSET', reaper, 'deadlines_from', cursor) else redis.call('HDEL', reaper, 'deadlines_from') end
end

-- Repeat wakes, because a dead engine may have got one.
if marks.has_passed(whole(last.woken_at), WAKE_EVERY_MS) then
  local num_claimable = 0 -- without requests that wait for their tenant's quota
  for line in pairs(LINES) do num_claimable = num_claimable + redis.call('LLEN', prefix .. line) end
  for _, band in ipairs(queue_policy(prefix).bands) do
    num_claimable = num_claimable + redis.call('ZCARD', prefix .. 'ready:' .. band)
  end
  wake_engines(prefix, math.min(num_claimable, MAX_WOKEN))
  redis.call('HSET', reaper, 'woken_at', time_ms)
end

if is_gap then
  redis.call('HSET', reaper, 'not_before', time_ms + lease_ttl_ms)
  return {reaped, is_more}
end
if time_ms < marks.cut(not_before, lease_ttl_ms) then
  redis.call('HSET', reaper, 'not_before', marks.cut(not_before, lease_ttl_ms))
  return {reaped, is_more}
end

if marks.has_passed(whole(last.recounted_at), RECOUNT_EVERY_MS) then
  recount_capacity(prefix)
  redis.call('HSET', reaper, 'recounted_at', time_ms)
end

local engines = redis.call('ZRANGEBYSCORE', prefix .. 'leases', '-inf', time_ms, 'LIMIT', 0, MAX_ENGINES)
for _, engine in ipairs(engines) do
  local counts = reclaim_engine(prefix, engine, true, tonumber(ARGV[2]), ARGV[5])
  local num_returned, num_parked = unpack(counts)
  reaped[#reaped + 1] = {'engine', engine, num_returned, num_parked}
end

drop_expired_homes(prefix)

local clients = redis.call('ZRANGEBYSCORE', prefix .. 'clients', '-inf', time_ms, 'LIMIT', 0, MAX_CLIENTS)
for _, client in ipairs(clients) do
  local requests, num_cancelled, is_listening = prefix .. 'client:' .. client, 0, false
  for _, id in ipairs(attempt('SMEMBERS', requests) or {}) do
    -- A client that is only stopped, or too busy to renew, still has its subscriptions; a dead one does not.
    if redis.call('PUBSUB', 'NUMSUB', prefix .. 'output:' .. id)[2] > 0 then
      is_listening = true
    else
      stop_request(prefix, id, 'cancelled')
      num_cancelled = num_cancelled + 1
    end
  end
  if is_listening then
    marks.set_lease(prefix, 'clients', client, lease_ttl_ms)
  else
    redis.call('ZREM', prefix .. 'clients', client)
    redis.call('DEL', requests)
  end
  if num_cancelled > 0 then reaped[#reaped + 1] = {'client', client, num_cancelled, 0} end
end
return {reaped, (#engines == MAX_ENGINES or #clients == MAX_CLIENTS) and 1 or is_more}
