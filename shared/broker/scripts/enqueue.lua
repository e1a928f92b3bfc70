-- Accept a request, once. KEYS: lane, request. ARGV: prefix, id, payload, ttl_ms, detached.
-- Returns 'new', or the state of the request that already has this id: the caller attaches to it.
-- Admission by depth and quota belongs here, and the choice of the lane by band and tenant.
local state = redis.call('HGET', KEYS[2], 'state')
if state then return state end
local prefix, id = ARGV[1], ARGV[2]
local entry = redis.call('XADD', KEYS[1], '*', 'id', id, 'request', ARGV[3])
redis.call('HSET', KEYS[2], 'state', 'queued', 'epoch', 0, 'count', 0, 'attempts', 0,
  'entry', entry, 'ttl', ARGV[4], 'detached', ARGV[5])
redis.call('PUBLISH', prefix .. 'wake', id)
return 'new'
