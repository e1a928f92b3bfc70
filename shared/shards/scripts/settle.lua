-- All keys are here: the model lives here from now on. KEYS: place, moved_by. ARGV: prefix, number of the move.
-- Returns 1; 0 if this is not the move's to say.
if redis.call('GET', KEYS[2]) ~= ARGV[2] then return 0 end
redis.call('DEL', KEYS[1])
return 1
