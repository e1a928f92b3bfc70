-- Say that a resumable request gets no more input: it ends when it has answered what it has. KEYS: request.
-- ARGV: prefix, id. Doing it twice does nothing. Returns nil if there is no such request, else a list: {'closed'}, or
-- {'not_resumable'}. One that has ended has no input to close, which is as well.
local prefix, id, key = ARGV[1], ARGV[2], KEYS[1]
local now = fields_of(key, 'state', 'chunks', 'closed', 'ending', 'count')
if not now.state then return nil end
if not now.chunks then return {'not_resumable'} end
if not now.closed then redis.call('HSET', key, 'closed', 1) end
if now.state == 'awaiting_input' then
  local count = whole(now.count)
  if not (now.ending and count and end_input(prefix, key, id, now.ending, count)) then set_aside(prefix, id) end
end
return {'closed'}
