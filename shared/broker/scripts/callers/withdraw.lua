-- uses: capacity
-- Withdraw an engine that claims nothing for a while: other engines must not leave requests to it, nor wait until it
-- has drained. Its lease stays. KEYS: leases. ARGV: prefix, engine.
local prefix, engine = ARGV[1], ARGV[2]
set_capacity(prefix, engine, nil)
for _, kind in ipairs({'reserved', 'ward'}) do
  if redis.call('GET', prefix .. kind) == engine then redis.call('DEL', prefix .. kind) end
end
return 1
