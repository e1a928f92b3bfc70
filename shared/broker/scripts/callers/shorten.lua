-- Keep what a reader has read to its end for a shorter time. KEYS: leases. ARGV: prefix, ttl_ms, then ids.
-- What has not ended, and what is gone sooner as it is, stays as it is. Returns how many were shortened.
local prefix, ttl_ms, num_shortened = ARGV[1], tonumber(ARGV[2]), 0
for i = 3, #ARGV do
  local id = ARGV[i]
  local key = prefix .. 'request:' .. id
  if ENDED[fields_of(key, 'state').state] and redis.call('PTTL', key) > ttl_ms then
    for _, kind in ipairs({'request:', 'log:', 'input:'}) do redis.call('PEXPIRE', prefix .. kind .. id, ttl_ms) end
    num_shortened = num_shortened + 1
  end
end
return num_shortened
