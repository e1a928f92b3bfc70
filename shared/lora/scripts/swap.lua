-- Change the record of a name, unless the name was changed meanwhile. KEYS: names. ARGV: field, value, new value.
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
return 1
