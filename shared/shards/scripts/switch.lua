-- Record the new place of a model. Runs at home. KEYS: placements, moves, the model's mark at home. ARGV: prefix,
-- model, target, number of the move. Returns 1; 0 if another move has taken over.
local move = redis.call('HGET', KEYS[2], ARGV[2])
if not move or cjson.decode(move).number ~= ARGV[4] then return 0 end
redis.call('HSET', KEYS[1], ARGV[2], ARGV[3])
if ARGV[3] ~= 'home' then redis.call('SET', KEYS[3], ARGV[3]) end
return 1
