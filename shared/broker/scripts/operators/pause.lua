-- uses: life
-- Pause a model: no request is claimed until it is resumed. KEYS: leases. ARGV: prefix, mode. Mode '0': running
-- requests continue to their end. '1': they are queued again, to resume after their last logged token. '2': they end,
-- aborted, and so do the requests that were queued again before. Returns the number of requests that ran.
local prefix, num_running = ARGV[1], 0
redis.call('HSETNX', prefix .. 'queue', 'paused', now_ms())
for _, engine in ipairs(redis.call('ZRANGE', prefix .. 'leases', 0, -1)) do
  local ids = attempt('HKEYS', prefix .. 'claims:' .. engine) or {}
  num_running = num_running + #ids
  for _, id in ipairs(ARGV[2] ~= '0' and ids or {}) do
    if ARGV[2] == '2' then
      end_request(prefix, id, 'cancelled', 'abort')
    elseif fields_of(prefix .. 'request:' .. id, 'state').state == 'claimed' then
      put_back(prefix, prefix .. 'request:' .. id, id, 'returned', 'handed_back', 'paused')
    else
      set_aside(prefix, id, {engine = engine})
    end
    tell_engine(prefix, engine, id)
  end
end
if ARGV[2] == '2' then
  for _, line in ipairs({'returned', 'suspects'}) do
    for _, id in ipairs(redis.call('LRANGE', prefix .. line, 0, -1)) do
      end_request(prefix, id, 'cancelled', 'abort')
    end
  end
end
return num_running
