-- Write and delete keys of a model at a server that does not serve it: at the target before, at the source after. KEYS:
-- place. ARGV: prefix, number of the move, expected mark, then an action for each key: 'delete', key; 'restore', key,
-- time to live (ms, 0 for ever), DUMP; 'add', key, id, number of fields and values, those of a stream's entry; 'last',
-- key, id of the last entry that a stream ever had. Returns 1; 0 if another move has taken over.
if redis.call('GET', KEYS[1]) ~= ARGV[3] then return 0 end
local i = 4
while i <= #ARGV do
  local action, key = ARGV[i], ARGV[i + 1]
  if action == 'delete' then
    redis.call('UNLINK', key)
    i = i + 2
  elseif action == 'restore' then
    redis.call('RESTORE', key, ARGV[i + 2], ARGV[i + 3], 'REPLACE')
    i = i + 4
  elseif action == 'add' then
    local after = i + 4 + tonumber(ARGV[i + 3])
    local reply = redis.pcall('XADD', key, ARGV[i + 2], unpack(ARGV, i + 4, after - 1))
    -- The call may have been repeated.
    local is_repeated = reply.err and string.find(reply.err, 'equal or smaller', 1, true)
    if reply.err and not is_repeated then return redis.error_reply(reply.err) end
    i = after
  else
    redis.call('XSETID', key, ARGV[i + 2])
    i = i + 3
  end
end
return 1
