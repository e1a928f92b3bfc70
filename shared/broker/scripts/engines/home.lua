-- uses: homes
-- Enter a device as a home of the model, or renew it. KEYS: leases. ARGV: prefix, device, lease_ttl_ms (0 to leave),
-- level, wake_ms. A home that is awake needs no grant any more.
local prefix, device, ttl_ms, level, wake_ms = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4], ARGV[5]
if ttl_ms == 0 then
  drop_homes(prefix, {device})
  return 0
end
marks.set_lease(prefix, 'homes', device, ttl_ms)
redis.call('HSET', prefix .. 'home_states', device, level .. ' ' .. wake_ms)
if level == '0' then redis.call('ZREM', prefix .. 'grants', device) end
return 1
