-- End what is past its deadline, take back what engines hold whose lease has ended, and cancel the requests of clients
-- that have vanished.
-- KEYS: leases. ARGV: prefix, max_deliveries, lease_ttl_ms, max_gap_ms, cause. To be called every fraction of a second, by
-- any number of reapers. Returns a list of {kind, name, queued again or cancelled, parked}, and whether there may be more.
--
-- Leases end by this server's clock, so a time in which the server (or every reaper) stood still must not count: after a
-- gap between two looks, nobody is taken for dead before everybody has had lease_ttl_ms to renew.
local prefix, lease_ttl_ms = ARGV[1], tonumber(ARGV[3])
local RECOUNT_EVERY_MS, WAKE_EVERY_MS, MAX_WOKEN = 10000, 500, 8
local MAX_ENGINES, MAX_CLIENTS = 64, 256 -- one call must not hold up the server; who gets so many calls again
local reaper, now, found = prefix .. 'reaper', now_ms(), {}
expire_due(prefix, 1000, 1000)
local last = fields(reaper, 'looked_at', 'not_before', 'recounted_at', 'woken_at', 'sampled_at')
-- The first write: a full Redis refuses it, and all that follows. (One that frees memory would be let through, and what
-- comes after it, too: engines would be taken for dead that could not renew their leases.)
redis.call('HSET', reaper, 'looked_at', now)
trim_events(prefix)
sample(prefix, last.sampled_at)

-- A wake that a dead engine has swallowed goes to another one.
if now - (whole(last.woken_at) or 0) > WAKE_EVERY_MS then
  local num_claimable = 0 -- not what waits for its tenant's quota
  for line in pairs(LINES) do num_claimable = num_claimable + redis.call('LLEN', prefix .. line) end
  for _, band in ipairs(queue_policy(prefix).bands) do
    num_claimable = num_claimable + redis.call('ZCARD', prefix .. 'ready:' .. band)
  end
  wake_engines(prefix, math.min(num_claimable, MAX_WOKEN))
  redis.call('HSET', reaper, 'woken_at', now)
end

if not (whole(last.looked_at) and whole(last.not_before)) or now - tonumber(last.looked_at) > tonumber(ARGV[4]) then
  redis.call('HSET', reaper, 'not_before', now + lease_ttl_ms)
  return {found, 0}
end
if now < tonumber(last.not_before) then return {found, 0} end

if now - (whole(last.recounted_at) or 0) > RECOUNT_EVERY_MS then
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
    redis.call('ZADD', prefix .. 'clients', now + lease_ttl_ms, client)
  else
    redis.call('ZREM', prefix .. 'clients', client)
    redis.call('DEL', requests)
  end
  if num_cancelled > 0 then found[#found + 1] = {'client', client, num_cancelled, 0} end
end
return {found, (#engines == MAX_ENGINES or #clients == MAX_CLIENTS) and 1 or 0}
