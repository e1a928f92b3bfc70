-- uses: tenants
-- Return the number of waiting requests of a partition that may be claimed; some tenants may be over a quota. 0 while
-- it is paused. KEYS: leases. ARGV: prefix. Engines choose the partition to help by it, so it must be cheap.
local prefix, queue = ARGV[1], ARGV[1] .. 'queue'
if redis.call('HEXISTS', queue, 'paused') == 1 then return 0 end
local count, num_ready = 0, 0
for _, band in ipairs(queue_policy(prefix).bands) do
  num_ready = num_ready + redis.call('ZCARD', prefix .. 'ready:' .. band)
end
if num_ready > 0 then count = waiting(prefix, queue) end
return count + redis.call('LLEN', prefix .. 'returned') + redis.call('LLEN', prefix .. 'suspects')
