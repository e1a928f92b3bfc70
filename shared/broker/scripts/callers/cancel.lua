-- uses: life
-- Cancel a request for its caller, in any state. KEYS: request. ARGV: prefix, id.
-- The end is written here and the epoch increased, so no live engine is needed; its engine is told to stop computing.
-- Returns the state of the request after the call, or nil if the id is unknown.
local prefix, id = ARGV[1], ARGV[2]
local state = fields_of(KEYS[1], 'state').state
if ENDED[state] or not state and not is_somewhere(prefix, id) then return state end
stop_request(prefix, id, 'cancelled')
return 'cancelled'
