-- Queue a parked request anew, under its own id, as if it had never run. KEYS: leases. ARGV: prefix, id.
-- It runs detached and without a deadline: whoever waited for it has got its error. If it is resumable, it has the input
-- that it had, and gets no more. Returns 1, or 0 if no such request is parked,
-- or too little of it was left to run it.
local prefix, id = ARGV[1], ARGV[2]
local key, parked = prefix .. 'request:' .. id, prefix .. 'parked:' .. id
local kept = fields_of(parked, 'payload', 'result_ttl_ms', 'epoch', 'tenant', 'band', 'prompt', 'max', 'input',
  'webhook', 'images')
local now = fields_of(key, 'state', 'epoch', 'call')
-- After its result had expired, the id may have been used anew.
if not kept.payload or kept.payload == '' or is_live(now.state) then return 0 end
-- The epoch goes on counting: an engine that still runs the parked life must not pass for the new one's.
local epoch = whole(now.epoch) or whole(kept.epoch) or next_epoch()
local prompt, most, ttl = whole(kept.prompt) or 0, whole(kept.max) or 0, whole(kept.result_ttl_ms) or LOST_TTL_MS
local tenant = kept.tenant and kept.tenant ~= '' and kept.tenant or 'default'
local is_read, input = true, nil
if kept.input then
  is_read, input = pcall(cmsgpack.unpack, kept.input)
  if not is_read or type(input) ~= 'table' then return 0 end
end
local record = {'epoch', epoch, 'ttl', ttl, 'prompt', prompt, 'max', most}
-- What it is compared by (enqueue.lua), without the token of the call that made it.
local content = now.call and string.match(now.call, ' .*')
if content then record[#record + 1], record[#record + 2] = 'call', content end
local past = attempt('HGETALL', key) or {}
for i = 1, #past, 2 do -- the events of its former life
  if is_entry(past[i]) then record[#record + 1], record[#record + 2] = past[i], past[i + 1] end
end
redis.call('DEL', key, prefix .. 'log:' .. id, prefix .. 'input:' .. id, parked)
redis.call('ZREM', prefix .. 'dead', id)
local band = kept.band and has_band(prefix, kept.band) and kept.band or queue_policy(prefix).default_band
if input then
  for _, chunk in ipairs(input) do redis.call('RPUSH', prefix .. 'input:' .. id, chunk) end
  for _, field in ipairs({'chunks', #input + 1, 'closed', 1}) do record[#record + 1] = field end
end
if kept.images then
  for _, field in ipairs({'images', kept.images}) do record[#record + 1] = field end
  hold_images(prefix, id, kept.images)
  let_images_go(prefix, parked_user(id), kept.images)
end
if kept.webhook then
  -- One answer of several is told of alone: the others have been, with its parking.
  for _, field in ipairs({'webhook', kept.webhook}) do record[#record + 1] = field end
end
enter_lane(prefix, id, kept.payload, tenant, band, prompt, most, nil, record, 'replayed')
note_entered(prefix)
return 1
