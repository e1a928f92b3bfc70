-- Deadlines that were set by a clock that was ahead. Put in front of reap.lua.

-- Cut a deadline that follows from a timeout to the whole of that from now: the clock was ahead when it was set.
local function cut_deadline(prefix, id, due)
  local now = fields_of(prefix .. 'request:' .. id, 'timeout', 'entry', 'tenant', 'band')
  local timeout = whole(now.timeout)
  local cut_due = timeout and marks.cut(due, timeout)
  if not cut_due or cut_due == due then return end
  redis.call('ZADD', prefix .. 'deadlines', cut_due, id)
  redis.call('HSET', prefix .. 'request:' .. id, 'deadline', cut_due)
  if now.entry and now.tenant and now.band then
    redis.call('ZADD', due_key(prefix, now.band, now.tenant), 'XX', cut_due, now.entry)
  end
end

-- Cut some deadlines, from a cursor on; returns the next cursor, "0" at the end.
local function cut_deadlines(prefix, cursor)
  local next_cursor, found = unpack(redis.call('ZSCAN', prefix .. 'deadlines', cursor, 'COUNT', 500))
  for i = 1, #found, 2 do cut_deadline(prefix, found[i], tonumber(found[i + 1])) end
  return next_cursor
end
