-- uses: lib
-- Create a batch, once. KEYS: batch, batches of its tenant, open. ARGV: id, spec, created_ms.
-- Returns whether it is new.
if redis.call('HSETNX', KEYS[1], 'spec', ARGV[2]) == 0 then return 0 end
redis.call('HSET', KEYS[1], 'status', 'validating')
redis.call('ZADD', KEYS[2], ARGV[3], ARGV[1])
redis.call('ZADD', KEYS[3], 0, ARGV[1])
return 1
