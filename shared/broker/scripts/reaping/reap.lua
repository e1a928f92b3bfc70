-- End what is past its deadline, take back what engines hold whose lease has ended, and cancel the requests of clients
-- that have vanished.
-- KEYS: leases. ARGV: prefix, max_deliveries, lease_ttl_ms, max_gap_ms, cause. To be called every fraction of a second, by
-- any number of reapers. Returns a list of {kind, name, queued again or cancelled, parked}, and whether there may be more.
--
-- Leases end by this server's clock, so a time in which the server (or every reaper) stood still must not count: after a
-- gap between two looks, nobody is taken for dead before everybody has had lease_ttl_ms to renew. A clock that was set
-- forward looks the same. After one that was set back, what it says of the future is cut (clock.lua).
local prefix, lease_ttl_ms = ARGV[1], tonumber(ARGV[3])
local RECOUNT_EVERY_MS, WAKE_EVERY_MS, MAX_WOKEN = 10000, 500, 8
local MAX_ENGINES, MAX_CLIENTS = 64, 256 -- one call must not hold up the server; who gets so many calls again
local BLOCKED_MS = (WINDOW_S + 1) * 1000
local reaper, now, found, is_more = prefix .. 'reaper', now_ms(), {}, 0
expire_due(prefix, 1000, 1000)
local last = fields(reaper, 'looked_at', 'not_before', 'recounted_at', 'woken_at', 'sampled_at', 'deadlines_from')
local looked_at, not_before = whole(last.looked_at), whole(last.not_before)
-- The first write: a full Redis refuses it, and all that follows. (One that frees memory would be let through, and what
-- comes after it, too: engines would be taken for dead that could not renew their leases.)
redis.call('HSET', reaper, 'looked_at', now)
local is_gap = not (looked_at and not_before) or now - looked_at > tonumber(ARGV[4])
local is_set_back = looked_at and looked_at > now + marks.MAX_LEAD_MS
if is_set_back then
  redis.call('HSET', reaper, 'set_back_at', now)
  -- What tenants used by the other clock is forgotten; of those that wait for it now, since it may look right later.
  for _, tenant in ipairs(redis.call('ZRANGE', prefix .. 'blocked', 0, marks.MAX_CUT)) do used(prefix, tenant) end
end
trim_events(prefix)
sample(prefix, last.sampled_at)

for _, kind in ipairs({'leases', 'clients'}) do marks.cut_leases(prefix, kind) end
marks.cut_all(prefix .. 'blocked', BLOCKED_MS)
for _, band in ipairs(queue_policy(prefix).bands) do marks.cut_all(prefix .. 'heads:' .. band, marks.MAX_LEAD_MS) end
-- Which deadlines are to be cut, their requests say; so there is a walk over all of them, after a gap as well, in which
-- nobody looked. A cursor outlives the call.
local cursor = (is_gap or is_set_back) and '0' or last.deadlines_from
if cursor then
  cursor = cut_deadlines(prefix, cursor)
  is_more = cursor ~= '0' and 1 or 0
  if is_more == 1 then redis.call('HSET', reaper, 'deadlines_from', cursor) else redis.call('HDEL', reaper, 'deadlines_from') end
end

-- A wake that a dead engine has swallowed goes to another one.
if marks.has_passed(whole(last.woken_at), WAKE_EVERY_MS) then
  local num_claimable = 0 -- not what waits for its tenant's quota
  for line in pairs(LINES) do num_claimable = num_claimable + redis.call('LLEN', prefix .. line) end
  for _, band in ipairs(queue_policy(prefix).bands) do
    num_claimable = num_claimable + redis.call('ZCARD', prefix .. 'ready:' .. band)
  end
  wake_engines(prefix, math.min(num_claimable, MAX_WOKEN))
  redis.call('HSET', reaper, 'woken_at', now)
end

if is_gap then
  redis.call('HSET', reaper, 'not_before', now + lease_ttl_ms)
  return {found, is_more}
end
if now < marks.cut(not_before, lease_ttl_ms) then
  redis.call('HSET', reaper, 'not_before', marks.cut(not_before, lease_ttl_ms))
  return {found, is_more}
end

if marks.has_passed(whole(last.recounted_at), RECOUNT_EVERY_MS) then
  recount_rooms(prefix)
  redis.call('HSET', reaper, 'recounted_at', now)
end

local engines = redis.call('ZRANGEBYSCORE', prefix .. 'leases', '-inf', now, 'LIMIT', 0, MAX_ENGINES)
for _, engine in ipairs(engines) do
  local counts = reclaim_engine(prefix, engine, true, tonumber(ARGV[2]), ARGV[5])
  local num_returned, num_parked = unpack(counts)
  found[#found + 1] = {'engine', engine, num_returned, num_parked}
end

local clients = redis.call('ZRANGEBYSCORE', prefix .. 'clients', '-inf', now, 'LIMIT', 0, MAX_CLIENTS)
for _, client in ipairs(clients) do
  local requests, num_cancelled, is_listening = prefix .. 'client:' .. client, 0, false
  for _, id in ipairs(attempt('SMEMBERS', requests) or {}) do
    -- A client that is only stopped, or too busy to renew, still has its subscriptions; a dead one's are gone.
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
  if num_cancelled > 0 then found[#found + 1] = {'client', client, num_cancelled, 0} end
end
return {found, (#engines == MAX_ENGINES or #clients == MAX_CLIENTS) and 1 or is_more}
