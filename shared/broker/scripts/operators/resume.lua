-- uses: life
-- Resume claims of a model's requests. KEYS: leases. ARGV: prefix. Returns 1, or 0 if it was not paused.
local was_paused = redis.call('HDEL', ARGV[1] .. 'queue', 'paused')
-- Requests that were requeued have started and wait to resume: that time is not slow service.
if was_paused == 1 then
  service.count_held_time(ARGV[1])
  redis.call('HSET', ARGV[1] .. 'queue', 'rate_at', now_ms())
end
wake_all(ARGV[1])
return was_paused
