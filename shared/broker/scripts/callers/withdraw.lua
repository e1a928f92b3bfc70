-- An engine claims nothing for a while: others are to leave nothing to it, nor wait for it to empty itself. Its lease stays.
-- KEYS: leases. ARGV: prefix, engine.
local prefix, engine = ARGV[1], ARGV[2]
set_room(prefix, engine, nil)
for _, kind in ipairs({'reserved', 'ward'}) do
  if redis.call('GET', prefix .. kind) == engine then redis.call('DEL', prefix .. kind) end
end
return 1
