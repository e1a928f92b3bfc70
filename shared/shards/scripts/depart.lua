-- Redirect all processes to the target from now on. KEYS: place, moved_by, leases. ARGV: prefix, number of the move,
-- target. Returns how many requests engines hold, and redirects only if none; -1 if the move is older than the last one
-- of this server.
if tonumber(ARGV[2]) < tonumber(redis.call('GET', KEYS[2]) or 0) then return -1 end
redis.call('SET', KEYS[2], ARGV[2])
local num_held = 0
for _, engine in ipairs(redis.call('ZRANGE', KEYS[3], 0, -1)) do
  num_held = num_held + redis.call('HLEN', ARGV[1] .. 'claims:' .. engine)
end
if num_held == 0 then redis.call('SET', KEYS[1], ARGV[3]) end
return num_held
