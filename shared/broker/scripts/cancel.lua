-- End a request on its caller's word, whatever state it is in. KEYS: request. ARGV: prefix, id.
-- The end is written here and the epoch raised, so it needs no live engine; the engine is told to stop computing.
-- Returns the state that the request has now, or nil if there is none of this id.
local state = redis.call('HGET', KEYS[1], 'state')
if state ~= 'queued' and state ~= 'claimed' and state ~= 'awaiting_input' then return state end
stop_request(ARGV[1], ARGV[2], 'cancelled')
return 'cancelled'
