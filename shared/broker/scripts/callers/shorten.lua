-- uses: lib
-- Shorten the time to live of results that a reader has read to the end. KEYS: leases. ARGV: prefix, ttl_ms, then ids.
-- Requests that have not ended, or expire sooner, do not change. Returns how many were shortened.
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
