-- End a request on its caller's word, whatever state it is in. KEYS: lane, request. ARGV: prefix, id.
-- The end is written here and the epoch raised, so it needs no live engine; the engine is told to stop computing.
-- Returns the state that the request has now, or nil if there is none of this id.
local prefix, id, key = ARGV[1], ARGV[2], KEYS[2]
local now = redis.call('HMGET', key, 'state', 'count', 'entry', 'ttl', 'engine')
if now[1] ~= 'queued' and now[1] ~= 'claimed' then return now[1] end
local count = tonumber(now[2])
redis.call('HINCRBY', key, 'epoch', 1)
emit(prefix, key, id, cmsgpack.pack({1, count, {}, '', 'cancelled'}), count)
close_request(prefix, key, id, 'cancelled', now[3], now[4])
if now[1] == 'claimed' then
  redis.call('PUBLISH', prefix .. 'engine:' .. now[5] .. ':commands', cmsgpack.pack({'cancel', id}))
end
return 'cancelled'
