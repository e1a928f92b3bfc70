-- uses: lib
-- Claim the lease of an open batch that has no holder. KEYS: batch, open. ARGV: id, holder, ttl_ms.
-- Returns {'taken', epoch}, {'held', remaining ms of the lease} or {'closed'}.
local ends_at = redis.call('ZSCORE', KEYS[2], ARGV[1])
if not ends_at then return {'closed'} end
local now = now_ms()
-- The call that claimed it may be sent again.
if redis.call('HGET', KEYS[1], 'holder') == ARGV[2] then return {'taken', tonumber(redis.call('HGET', KEYS[1], 'epoch'))} end
local held_until = marks.cut(tonumber(ends_at), tonumber(redis.call('HGET', KEYS[1], 'lease_ms') or ARGV[3]))
if held_until > now then
  redis.call('ZADD', KEYS[2], held_until, ARGV[1])
  return {'held', held_until - now}
end
redis.call('HSET', KEYS[1], 'holder', ARGV[2], 'lease_ms', ARGV[3])
redis.call('ZADD', KEYS[2], now + tonumber(ARGV[3]), ARGV[1])
return {'taken', redis.call('HINCRBY', KEYS[1], 'epoch', 1)}
