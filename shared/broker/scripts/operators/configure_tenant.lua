-- uses: life
-- Set a tenant's policy, as JSON; an empty one restores the model's default. KEYS: leases.
-- ARGV: prefix, tenant, policy. Returns 1.
local prefix, tenant = ARGV[1], ARGV[2]
if ARGV[3] == '' then
  redis.call('HDEL', prefix .. 'tenants', tenant)
else
  redis.call('HSET', prefix .. 'tenants', tenant, ARGV[3])
end
unblock(prefix, tenant)
wake_all(prefix)
return 1
