-- uses: life
-- Set a model's queue policy, as JSON. KEYS: leases. ARGV: prefix, policy, then the names of its bands.
-- Returns the bands with waiting requests that the policy lacks: then nothing is changed.
local prefix, is_retained, occupied, removed = ARGV[1], {}, {}, {}
for i = 3, #ARGV do is_retained[ARGV[i]] = true end
for _, band in ipairs(queue_policy(prefix).bands) do
  if not is_retained[band] then
    removed[#removed + 1] = band
    if tonumber(redis.call('HGET', prefix .. 'queue', 'depth:' .. band) or 0) > 0 then occupied[#occupied + 1] = band end
  end
end
if #occupied > 0 then return occupied end
for _, band in ipairs(removed) do
  redis.call('DEL', prefix .. 'idle:' .. band)
  redis.call('HDEL', prefix .. 'queue', 'depth:' .. band, 'tokens:' .. band, 'clock:' .. band, 'weight:' .. band,
    'credit:' .. band, 'entered:' .. band, 'rate:' .. band)
end
-- Quotas may have changed, so check all blocked tenants again.
for _, tenant in ipairs(redis.call('ZRANGE', prefix .. 'blocked', 0, -1)) do unblock(prefix, tenant) end
redis.call('SET', prefix .. 'policy', ARGV[2])
wake_all(prefix)
return occupied
