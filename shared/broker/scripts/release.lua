-- Hand claimed requests back: another engine goes on after the last logged token.
-- KEYS: lane. ARGV: prefix, then for each request: id, epoch. Returns one number each: 1 handed back, 0 stale.
-- The reclaim of a dead engine's requests will share this end of the road.
local prefix, verdicts = ARGV[1], {}
for i = 2, #ARGV, 2 do
  local id = ARGV[i]
  local key = prefix .. 'request:' .. id
  local now = redis.call('HMGET', key, 'epoch', 'state')
  if now[1] == ARGV[i + 1] and now[2] == 'claimed' then
    redis.call('HSET', key, 'state', 'queued')
    redis.call('HDEL', key, 'engine')
    redis.call('RPUSH', prefix .. 'returned', id)
    redis.call('PUBLISH', prefix .. 'wake', id)
    verdicts[#verdicts + 1] = 1
  else
    verdicts[#verdicts + 1] = 0
  end
end
return verdicts
