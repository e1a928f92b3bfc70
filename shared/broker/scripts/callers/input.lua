-- The input of resumable requests; put in front of end_segment.lua, extend.lua and close_input.lua.
--
-- A segment is what a request generates from one chunk. After a segment nobody holds the request: if it has another
-- chunk it stands in "returned", to be claimed anew, else it is awaiting_input until there is one, and ends once its input
-- is closed. So all that can happen to its engine in the meantime does not touch it.

-- End a request whose input is closed and answered. ending is its last record, count its output tokens. Returns whether
-- there is a log to write that to.
local function end_input(prefix, key, id, ending, count)
  if not emit(prefix, key, id, ending, count) then return false end
  close_request(prefix, key, id, 'finished', 'input_closed')
  note_uncounted_end(prefix, 'finished')
  return true
end

-- Put a request that awaits its next chunk in line: there is one now. The engine that had the last segment is woken.
local function resume(prefix, key, id, now)
  leave_awaiting(prefix, key)
  move(key, 'awaiting_input', 'queued', 'line', 'returned', 'arrived_at', now_ms(), note_move(prefix, id, now.tenant, now.band,
    'continued', now.count or 0, '', ''))
  redis.call('RPUSH', prefix .. 'returned', id)
  local digests = redis.call('HGET', key, 'digests')
  local engine = digests and attempt('GET', prefix .. 'warm:' .. string.match(digests, '%S*$'))
  wake_engines(prefix, 1, nil, engine and {[engine] = 1})
end
