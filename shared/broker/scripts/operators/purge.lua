-- uses: life
-- Cancel the requests in a tenant's lanes, and free their inputs. KEYS: leases. ARGV: prefix, tenant, band, most. An empty band means all.
-- Returns how many were cancelled; call it again until that is 0. Requests that were claimed before are not touched.
local prefix, tenant, most, num_cancelled = ARGV[1], ARGV[2], tonumber(ARGV[4]), 0
local function cancel(id)
  stop_request(prefix, id, 'cancelled')
  redis.call('DEL', prefix .. 'retry:' .. id)
end
for _, band in ipairs(queue_policy(prefix).bands) do
  if ARGV[3] == '' or ARGV[3] == band then
    num_cancelled = num_cancelled + end_lane(prefix, tenant, band, most - num_cancelled, cancel)
  end
end
return num_cancelled
