-- End a generation: its ranks no longer compute together. KEYS: group. ARGV: generation. Returns whether it was the
-- last one.
if redis.call('HGET', KEYS[1], 'generation') ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'over', '1')
return 1
