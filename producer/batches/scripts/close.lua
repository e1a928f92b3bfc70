-- uses: lib
-- Close a batch after its end was reported, so that no runner claims it.
-- KEYS: batch, open. ARGV: id, holder, batch_ttl_ms.
local state = redis.call('HMGET', KEYS[1], 'status', 'holder')
if state[2] ~= ARGV[2] or not ENDS[state[1]] then return 0 end
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('HDEL', KEYS[1], 'event')
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return 1
