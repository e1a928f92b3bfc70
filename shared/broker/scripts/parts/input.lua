-- uses: life
-- The input of resumable requests.
--
-- A segment is the output for one chunk of input. After a segment no engine holds the request: if it has another chunk
-- it is in "returned", to be claimed again; otherwise it is awaiting_input until a chunk arrives, and ends once its
-- input is closed. So a failure of its engine in the meantime does not affect it.

-- End a request whose input is closed and answered. ending is its last record, count its output tokens. Returns whether
-- there is a log to write the record to.
local function end_input(prefix, key, id, ending, count)
  if not emit(prefix, key, id, ending, count) then return false end
  close_request(prefix, key, id, 'finished', 'input_closed')
  count_end(prefix, 'finished')
  return true
end

-- Queue a request that was awaiting its next chunk, because there is one now. The engine of its last segment is woken.
local function resume(prefix, key, id, request)
  leave_awaiting(prefix, key)
  move(key, 'awaiting_input', 'queued', 'line', 'returned', 'arrived_at', now_ms(), note_move(prefix, id, request.tenant, request.band,
    'continued', request.count or 0, '', ''))
  redis.call('RPUSH', prefix .. 'returned', id)
  local digests = redis.call('HGET', key, 'digests')
  local engine = digests and attempt('GET', prefix .. 'warm:' .. string.match(digests, '%S*$'))
  wake_engines(prefix, 1, nil, engine and {[engine] = 1})
end
