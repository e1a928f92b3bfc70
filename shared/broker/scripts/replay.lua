-- Queue a parked request anew, under its own id, as if it had never run. KEYS: lane. ARGV: prefix, id.
-- It runs detached: whoever waited for it has got its error. Returns 1, or 0 if no such request is parked.
local prefix, id = ARGV[1], ARGV[2]
local key, parked = prefix .. 'request:' .. id, prefix .. 'parked:' .. id
local kept = redis.call('HMGET', parked, 'payload', 'result_ttl_ms', 'epoch')
if not kept[1] then return 0 end
-- The epoch goes on counting: an engine that still runs the parked life must not pass for the new one's.
local epoch = redis.call('HGET', key, 'epoch') or kept[3]
redis.call('DEL', key, prefix .. 'log:' .. id, parked)
redis.call('ZREM', prefix .. 'dead', id)
local entry = redis.call('XADD', KEYS[1], '*', 'id', id, 'request', kept[1])
redis.call('HSET', key, 'state', 'queued', 'epoch', epoch, 'count', 0, 'attempts', 0, 'entry', entry, 'ttl', kept[2])
redis.call('PUBLISH', prefix .. 'wake', id)
return 1
