-- Remove a name. KEYS: names, numbers. ARGV: field, the expected value, its digest. Returns 1 if it had that value. The
-- number is removed with the last name of the adapter.
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then return 0 end
redis.call('HDEL', KEYS[1], ARGV[1])
local number = string.match(ARGV[2], '^%d+')
for _, value in ipairs(redis.call('HVALS', KEYS[1])) do
  if string.match(value, '^%d+') == number then return 1 end
end
redis.call('HDEL', KEYS[2], number, ARGV[3])
return 1
