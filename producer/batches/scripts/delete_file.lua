-- uses: lib
-- Delete a file; its contents become garbage. KEYS: file, files of its tenant, garbage. ARGV: id.
-- Returns whether it existed.
redis.call('ZREM', KEYS[2], ARGV[1])
if redis.call('DEL', KEYS[1]) == 0 then return 0 end
redis.call('ZADD', KEYS[3], 0, ARGV[1])
return 1
