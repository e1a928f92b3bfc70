-- End a request on its caller's word, whatever state it is in. KEYS: request. ARGV: prefix, id.
-- The end is written here and the epoch raised, so it needs no live engine; the engine is told to stop computing.
-- Returns the state that the request has now, or nil if there is none of this id.
local prefix, id = ARGV[1], ARGV[2]
local state = fields_of(KEYS[1], 'state').state
if ENDED[state] or not state and not is_somewhere(prefix, id) then return state end
stop_request(prefix, id, 'cancelled')
return 'cancelled'
