-- Stop handing out requests of a model, until it is resumed. KEYS: leases. ARGV: prefix, what becomes of what runs.
-- '0': it runs on to its end. '1': it is queued again, to go on after its last logged token. '2': it ends, aborted, and
-- so does what was queued again before.
-- Returns how many requests ran.
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
