-- uses: homes
-- Enter a device as a home of the model, or renew it. KEYS: leases. ARGV: prefix, device, lease_ttl_ms (0 to leave),
-- level, wake_ms, ms until it is expected to be awake (-1 if unknown), sequences of its engine, and the error if the
-- device has given the model up ('' if not). A home that is awake needs no grant any more.
local prefix, device, ttl_ms, level, wake_ms, ready_ms, seqs, home_error =
  ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4], ARGV[5], tonumber(ARGV[6]), ARGV[7], ARGV[8]
-- Waiting requests that end in one call, so that it blocks the server for a short time only.
local MAX_FAILED = 500
if ttl_ms == 0 then
  drop_homes(prefix, {device})
  return 0
end
marks.set_lease(prefix, 'homes', device, ttl_ms)
local ready_at = ready_ms < 0 and 0 or now_ms() + ready_ms
redis.call('HSET', prefix .. 'home_states', device,
  string.format('%s %s %.0f %s', level, wake_ms, ready_at, seqs))
if home_error == '' then
  redis.call('HDEL', prefix .. 'home_errors', device)
else
  redis.call('HSET', prefix .. 'home_errors', device, home_error)
  fail_given_up(prefix, MAX_FAILED)
end
if level == '0' then redis.call('ZREM', prefix .. 'grants', device) end
return 1
