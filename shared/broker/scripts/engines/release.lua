-- uses: life
-- Release claimed requests: another engine resumes after the last logged token.
-- KEYS: leases. ARGV: prefix, the cause for their events, then for each request: id, epoch. Returns one number each: 1
-- released; 0 if the claim is stale, or the request was parked because its record is damaged.
local prefix, cause, verdicts = ARGV[1], ARGV[2], {}
for i = 3, #ARGV, 2 do
  local id = ARGV[i]
  local key = prefix .. 'request:' .. id
  local request = fields_of(key, 'epoch', 'state')
  if request.epoch == ARGV[i + 1] and request.state == 'claimed' then
    put_back(prefix, key, id, 'returned', 'handed_back', cause)
    verdicts[#verdicts + 1] = 1
  else
    local engine = not (whole(request.epoch) and MOVES[request.state]) and holder_of(prefix, id)
    if engine then set_aside(prefix, id, {engine = engine}) end
    verdicts[#verdicts + 1] = 0
  end
end
return verdicts
