-- uses: measures
-- Return the queues of tenants. KEYS: leases. ARGV: prefix, tenants. Returns a msgpack array with, for each tenant: its
-- name, requests that were claimed and have not ended, ms at which its quotas are checked again (0 if it is within
-- them, -1 if one of its requests must end first), its weight and quotas (0 for none), and its lanes: band, requests,
-- tokens, arrival (ms) of the first request, virtual time (-1 while the lane cannot be claimed from).
local prefix, rows = ARGV[1], {}
for i = 2, #ARGV do
  local tenant, lanes = ARGV[i], {}
  for _, band in ipairs(queue_policy(prefix).bands) do
    local depth, tokens = waiting_in(prefix .. 'tenant:' .. tenant, band)
    if count_of(depth) > 0 then
      local head = redis.call('ZSCORE', prefix .. 'heads:' .. band, tenant)
      if not head then
        local first = first_entry(prefix, band, tenant)
        head = first and arrival_ms(prefix, first[1], first[2][2])
      end
      lanes[#lanes + 1] = {band, count_of(depth), count_of(tokens), tonumber(head or 0),
        tonumber(redis.call('ZSCORE', prefix .. 'ready:' .. band, tenant) or -1)}
    end
  end
  rows[#rows + 1] = {tenant, num_started(prefix, tenant), blocked_until(prefix, tenant), limits_of(prefix, tenant), lanes}
end
return cmsgpack.pack(rows)
