-- Accept a request, once.
-- KEYS: lane, request. ARGV: prefix, id, payload, ttl_ms, client, client_ttl_ms, fail_fast, call.
-- An empty client means detached. Returns 'new', 'unserved' if it was not to wait and no engine lives, or the state of
-- the request that already has this id: the caller attaches to it. A call that is sent again is 'new' again.
-- Admission by depth and quota belongs here, and the choice of the lane by band and tenant.
local prefix, id, client = ARGV[1], ARGV[2], ARGV[5]
local known = redis.call('HMGET', KEYS[2], 'state', 'call')
if known[1] then return ARGV[8] ~= '' and known[2] == ARGV[8] and 'new' or known[1] end
local fail_fast = ARGV[7] == '1'
if fail_fast and not is_served(prefix) then return 'unserved' end
local entry = redis.call('XADD', KEYS[1], '*', 'id', id, 'request', ARGV[3])
redis.call('HSET', KEYS[2], 'state', 'queued', 'epoch', 0, 'count', 0, 'attempts', 0,
  'entry', entry, 'ttl', ARGV[4], 'call', ARGV[8])
if client ~= '' then
  redis.call('HSET', KEYS[2], 'client', client)
  redis.call('SADD', prefix .. 'client:' .. client, id)
  redis.call('ZADD', prefix .. 'clients', now_ms() + tonumber(ARGV[6]), client)
end
if fail_fast then
  redis.call('HSET', KEYS[2], 'fail_fast', 1)
  redis.call('SADD', prefix .. 'fail_fast', id)
end
redis.call('PUBLISH', prefix .. 'wake', id)
return 'new'
