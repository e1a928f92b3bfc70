-- uses: lib
-- Record the adapters that an engine has loaded, for ttl_ms. KEYS: leases. ARGV: prefix, engine, ttl_ms, digests.
local prefix, engine, ttl_ms = ARGV[1], ARGV[2], tonumber(ARGV[3])
local own, is_loaded = prefix .. 'adapters_of:' .. engine, {}
for i = 4, #ARGV do is_loaded[ARGV[i]] = true end
for _, digest in ipairs(redis.call('SMEMBERS', own)) do
  if not is_loaded[digest] then
    redis.call('SREM', own, digest)
    redis.call('ZREM', prefix .. 'adapter:' .. digest, engine)
  end
end
for digest in pairs(is_loaded) do
  local engines = prefix .. 'adapter:' .. digest
  redis.call('SADD', own, digest)
  redis.call('ZREMRANGEBYSCORE', engines, '-inf', now_ms())
  redis.call('ZADD', engines, now_ms() + ttl_ms, engine)
  redis.call('PEXPIRE', engines, ttl_ms)
end
if #ARGV > 3 then redis.call('PEXPIRE', own, ttl_ms) end
return 1
