-- Hand claimed requests back: another engine goes on after the last logged token.
-- KEYS: leases. ARGV: prefix, then for each request: id, epoch. Returns one number each: 1 handed back, 0 stale, or
-- set aside since its record is damaged.
local prefix, verdicts = ARGV[1], {}
for i = 2, #ARGV, 2 do
  local id = ARGV[i]
  local key = prefix .. 'request:' .. id
  local now = fields_of(key, 'epoch', 'state')
  if now.epoch == ARGV[i + 1] and now.state == 'claimed' then
    put_back(prefix, key, id, 'returned', 'handed_back')
    verdicts[#verdicts + 1] = 1
  else
    local engine = not (whole(now.epoch) and MOVES[now.state]) and holder_of(prefix, id)
    if engine then set_aside(prefix, id, {engine = engine}) end
    verdicts[#verdicts + 1] = 0
  end
end
return verdicts
