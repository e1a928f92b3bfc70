-- End what is past its deadline, take back what engines hold whose lease has ended, and cancel the requests of clients
-- that have vanished.
-- KEYS: leases. ARGV: prefix, max_deliveries, lease_ttl_ms, max_gap_ms, cause. To be called every fraction of a second, by
-- any number of reapers. Returns a list of {kind, name, queued again or cancelled, parked}.
--
-- Leases end by this server's clock, so a time in which the server (or every reaper) stood still must not count: after a
-- gap between two looks, nobody is taken for dead before everybody has had lease_ttl_ms to renew.
local prefix, lease_ttl_ms = ARGV[1], tonumber(ARGV[3])
local reaper, now, found = prefix .. 'reaper', now_ms(), {}
expire_due(prefix, 1000, 1000)
local last = fields(reaper, 'looked_at', 'not_before')
redis.call('HSET', reaper, 'looked_at', now)
if not (whole(last.looked_at) and whole(last.not_before)) or now - tonumber(last.looked_at) > tonumber(ARGV[4]) then
  redis.call('HSET', reaper, 'not_before', now + lease_ttl_ms)
  return found
end
if now < tonumber(last.not_before) then return found end

for _, engine in ipairs(redis.call('ZRANGEBYSCORE', prefix .. 'leases', '-inf', now)) do
  local counts = reclaim_engine(prefix, engine, true, tonumber(ARGV[2]), ARGV[5])
  found[#found + 1] = {'engine', engine, counts[1], counts[2]}
end

for _, client in ipairs(redis.call('ZRANGEBYSCORE', prefix .. 'clients', '-inf', now)) do
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
return found
