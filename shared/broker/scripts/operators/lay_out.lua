-- uses: lib
-- Move this partition to a new layout of its model's partitions: calls that use an older one are refused from now on.
-- KEYS: leases. ARGV: prefix, version of the layout. Returns 1; 0 if it has a newer one.
local prefix = ARGV[1]
local key = prefix .. 'layout'
if (tonumber(redis.call('GET', key) or 0) or 0) > tonumber(ARGV[2]) then return 0 end
redis.call('SET', key, ARGV[2])
redis.call('PUBLISH', prefix .. 'wake', '')
return 1
