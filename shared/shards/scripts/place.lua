-- Return the shard of a model, and record it if it is new. Runs at home. KEYS: placements, the model's mark at home,
-- then keys of which a model at home has one. ARGV: prefix, model, the shard for a new model. The mark refuses
-- processes without shards, which expect the model at home.
local place = redis.call('HGET', KEYS[1], ARGV[2])
if place then return place end
place = ARGV[3]
for i = 3, #KEYS do
  if redis.call('EXISTS', KEYS[i]) == 1 then place = 'home' end
end
redis.call('HSET', KEYS[1], ARGV[2], place)
if place ~= 'home' then redis.call('SET', KEYS[2], place) end
return place
