-- uses: life
-- Cancel the requests in a tenant's lanes. KEYS: leases. ARGV: prefix, tenant, band, most. An empty band means all.
-- Returns how many were cancelled; call it again until that is 0. Requests that were claimed before are not touched.
local prefix, tenant, most, num_cancelled = ARGV[1], ARGV[2], tonumber(ARGV[4]), 0
for _, band in ipairs(queue_policy(prefix).bands) do
  if ARGV[3] == '' or ARGV[3] == band then
    while num_cancelled < most do
      local head = redis.call('XRANGE', lane_key(prefix, band, tenant), '-', '+', 'COUNT', 1)[1]
      if not head then break end
      local entry, content = unpack(head)
      local id = content[1] == 'id' and content[2]
      local standing = id and standing_of(prefix, id, entry)
      if standing == 'lost' then mend_request(prefix, id, {tenant = tenant, band = band, entry = entry}) end
      if standing and standing ~= 'stray' then
        stop_request(prefix, id, 'cancelled')
        num_cancelled = num_cancelled + 1
      end
      -- Still there if something else wrote it, or its record names another lane.
      if redis.call('XRANGE', lane_key(prefix, band, tenant), entry, entry)[1] then
        drop_entry(prefix, entry, tenant, band)
      end
    end
  end
end
return num_cancelled
