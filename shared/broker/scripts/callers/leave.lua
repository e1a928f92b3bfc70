-- Let an interactive request outlive its reader. KEYS: request. ARGV: prefix, id, ttl_ms.
-- From now on it lives by a lease of its own, which nobody renews: when it ends, a reaper cancels the request, unless
-- somebody listens to it by then, and then looks again. Does nothing for one that has ended or is detached.
local prefix, id = ARGV[1], ARGV[2]
local now = fields_of(KEYS[1], 'state', 'client')
if not is_live(now.state) or not now.client then return 0 end
local heir = 'left:' .. id
redis.call('SREM', prefix .. 'client:' .. now.client, id)
redis.call('SADD', prefix .. 'client:' .. heir, id)
redis.call('HSET', KEYS[1], 'client', heir)
marks.set_lease(prefix, 'clients', heir, tonumber(ARGV[3]))
return 1
