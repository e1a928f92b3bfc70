-- Write and delete keys of a model where it does not live: at the target before, at the source after. KEYS: place.
-- ARGV: prefix, number of the move, mark that must be here, then for each key what to do: 'delete', key;
-- 'restore', key, time to live (ms, 0 for ever), DUMP; 'add', key, id, number of fields and values, those of a stream's
-- entry; 'last', key, id of the last entry that a stream ever had. Returns 1; 0 if this is not the move's to write.
if redis.call('GET', KEYS[1]) ~= ARGV[3] then return 0 end
local i = 4
while i <= #ARGV do
  local what, key = ARGV[i], ARGV[i + 1]
  if what == 'delete' then
    redis.call('UNLINK', key)
    i = i + 2
  elseif what == 'restore' then
    redis.call('RESTORE', key, ARGV[i + 2], ARGV[i + 3], 'REPLACE')
    i = i + 4
  elseif what == 'add' then
    local after = i + 4 + tonumber(ARGV[i + 3])
    local done = redis.pcall('XADD', key, ARGV[i + 2], unpack(ARGV, i + 4, after - 1))
    -- The call may have been repeated.
    if done.err and not string.find(done.err, 'equal or smaller', 1, true) then return redis.error_reply(done.err) end
    i = after
  else
    redis.call('XSETID', key, ARGV[i + 2])
    i = i + 3
  end
end
return 1
