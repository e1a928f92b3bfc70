-- Hand out requests of a model again. KEYS: leases. ARGV: prefix. Returns 1, or 0 if it was not paused.
local was_paused = redis.call('HDEL', ARGV[1] .. 'queue', 'paused')
-- What was put back has started and waits to go on: the time of that is not slow service.
if was_paused == 1 then
  service.note_under_way(ARGV[1])
  redis.call('HSET', ARGV[1] .. 'queue', 'rate_at', now_ms())
end
wake_all(ARGV[1])
return was_paused
