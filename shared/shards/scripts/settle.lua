-- Serve the model here, since all keys are copied. KEYS: place, moved_by. ARGV: prefix, number of the move. Returns 1;
-- 0 if another move has taken over.
if redis.call('GET', KEYS[2]) ~= ARGV[2] then return 0 end
redis.call('DEL', KEYS[1])
return 1
