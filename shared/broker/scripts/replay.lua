-- Queue a parked request anew, under its own id, as if it had never run. KEYS: leases. ARGV: prefix, id.
-- It runs detached and without a deadline: whoever waited for it has got its error. If it is resumable, it has the input
-- that it had, and gets no more. Returns 1, or 0 if no such request is parked.
local prefix, id = ARGV[1], ARGV[2]
local key, parked = prefix .. 'request:' .. id, prefix .. 'parked:' .. id
local kept = redis.call('HMGET', parked, 'payload', 'result_ttl_ms', 'epoch', 'tenant', 'band', 'prompt', 'max', 'input',
  'webhook')
local state = redis.call('HGET', key, 'state')
-- After its result had expired, the id may have been used anew.
if not kept[1] or state == 'queued' or state == 'claimed' or state == 'awaiting_input' then return 0 end
-- The epoch goes on counting: an engine that still runs the parked life must not pass for the new one's.
local epoch = redis.call('HGET', key, 'epoch') or kept[3]
redis.call('DEL', key, prefix .. 'log:' .. id, prefix .. 'input:' .. id, parked)
redis.call('ZREM', prefix .. 'dead', id)
local band = has_band(prefix, kept[5]) and kept[5] or queue_policy(prefix).default_band
local fields = {'epoch', epoch, 'ttl', kept[2], 'prompt', kept[6], 'max', kept[7]}
if kept[8] then
  local input = cmsgpack.unpack(kept[8])
  for _, chunk in ipairs(input) do redis.call('RPUSH', prefix .. 'input:' .. id, chunk) end
  for _, field in ipairs({'chunks', #input + 1, 'closed', 1}) do fields[#fields + 1] = field end
end
if kept[9] then
  -- One answer of several is told of alone: the others have been, with its parking.
  for _, field in ipairs({'webhook', kept[9]}) do fields[#fields + 1] = field end
end
enter_lane(prefix, id, kept[1], kept[4], band, kept[6] + kept[7], nil, fields)
note_entered(prefix)
return 1
