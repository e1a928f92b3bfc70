-- uses: homes
-- Request the right to wake a model at a home, or renew it. KEYS: leases. ARGV: prefix, device, lease_ttl_ms (0 to give
-- it back), wake_ms, number of engines that should be awake, ms for which the caller leaves requests to a faster home
-- (below 0 if they have waited for longer).
-- Returns {'granted', 0}, {'elsewhere', 0} if enough engines are awake or waking, or {'later', ms}: another home wakes
-- it faster, and goes first until that time and the difference have passed, or its lease ends. The cheapest home thus
-- wakes it, and a dead one is passed. The caller asks again after ms, which is no longer than that lease.
local prefix, device, ttl_ms, wake_ms = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local grants = prefix .. 'grants'
if ttl_ms == 0 then
  redis.call('ZREM', grants, device)
  return {'returned', 0}
end
drop_expired_homes(prefix)
local function granted()
  marks.set_lease(prefix, 'grants', device, ttl_ms)
  return {'granted', 0}
end
if redis.call('ZSCORE', grants, device) then return granted() end
local num_engines = num_awake(prefix) + redis.call('ZCARD', grants)
if num_engines >= tonumber(ARGV[5]) then return {'elsewhere', 0} end
local cheapest_ms, cheapest = wake_ms, device
for _, home in ipairs(live_homes(prefix)) do
  local is_asleep = home[2] > 0 and home[6] == '' and not redis.call('ZSCORE', grants, home[1])
  if home[1] ~= device and is_asleep and home[3] < cheapest_ms then cheapest_ms, cheapest = home[3], home[1] end
end
local later_ms = wake_ms - cheapest_ms + tonumber(ARGV[6])
if cheapest == device or later_ms <= 0 then return granted() end
local lease_ms = tonumber(redis.call('ZSCORE', prefix .. 'homes', cheapest)) - now_ms() + 1
return {'later', math.min(later_ms, lease_ms)}
