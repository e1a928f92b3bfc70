-- uses: lib
-- Let an interactive request outlive its reader. KEYS: request. ARGV: prefix, id, ttl_ms.
-- It gets a lease of its own, which no process renews: when it expires, a reaper cancels the request, unless a reader
-- listens to it then; in that case it checks again later. No effect on a request that has ended or is detached.
local prefix, id = ARGV[1], ARGV[2]
local request = fields_of(KEYS[1], 'state', 'client')
if not is_live(request.state) or not request.client then return 0 end
local heir = 'left:' .. id
redis.call('SREM', prefix .. 'client:' .. request.client, id)
redis.call('SADD', prefix .. 'client:' .. heir, id)
redis.call('HSET', KEYS[1], 'client', heir)
marks.set_lease(prefix, 'clients', heir, tonumber(ARGV[3]))
return 1
