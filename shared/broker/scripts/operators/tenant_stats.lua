-- What some tenants have in line. KEYS: leases. ARGV: prefix, tenants. Returns a msgpack array of, for each tenant:
-- its name, requests that were claimed and have not ended, ms at which its quotas are looked at again (0 if it is within
-- them, -1 if one of its requests has to end first), its weight, and its lanes: band, requests, tokens, arrival (ms) of the first.
local prefix, found = ARGV[1], {}
for i = 2, #ARGV do
  local tenant, lanes = ARGV[i], {}
  local blocked = redis.call('ZSCORE', prefix .. 'blocked', tenant)
  for _, band in ipairs(queue_policy(prefix).bands) do
    local depth, tokens = waiting_in(prefix .. 'tenant:' .. tenant, band)
    if count_of(depth) > 0 then
      local head = redis.call('ZSCORE', prefix .. 'heads:' .. band, tenant)
      if not head then
        local first = first_entry(prefix, band, tenant)
        head = first and arrival_ms(prefix, first[1], first[2][2])
      end
      lanes[#lanes + 1] = {band, count_of(depth), count_of(tokens), tonumber(head or 0)}
    end
  end
  found[#found + 1] = {tenant, num_started(prefix, tenant), blocked == 'inf' and -1 or tonumber(blocked or 0),
    tenant_policy(prefix, tenant).weight, lanes}
end
return cmsgpack.pack(found)
