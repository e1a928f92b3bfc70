-- Return the shard of a model, which is recorded now if it was not before. Runs at home.
-- KEYS: placements, the model's mark at home, then keys that a model has which is at home. ARGV: prefix, model, the
-- shard that it is to have.
-- The mark refuses processes that know of no shards and believe the model at home.
local place = redis.call('HGET', KEYS[1], ARGV[2])
if place then return place end
place = ARGV[3]
for i = 3, #KEYS do
  if redis.call('EXISTS', KEYS[i]) == 1 then place = 'home' end
end
redis.call('HSET', KEYS[1], ARGV[2], place)
if place ~= 'home' then redis.call('SET', KEYS[2], place) end
return place
