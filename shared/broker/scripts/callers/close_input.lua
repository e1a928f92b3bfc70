-- uses: input
-- Close the input of a resumable request: it ends when it has answered its chunks. KEYS: request.
-- ARGV: prefix, id. A second call has no effect. Returns nil if there is no such request, else a list: {'closed'}, also
-- for a request that has ended, or {'not_resumable'}.
local prefix, id, key = ARGV[1], ARGV[2], KEYS[1]
local request = fields_of(key, 'state', 'chunks', 'closed', 'ending', 'count')
if not request.state then return nil end
if not request.chunks then return {'not_resumable'} end
if not request.closed then redis.call('HSET', key, 'closed', 1) end
if request.state == 'awaiting_input' then
  local count = whole(request.count)
  if not (request.ending and count and end_input(prefix, key, id, request.ending, count)) then set_aside(prefix, id) end
end
return {'closed'}
