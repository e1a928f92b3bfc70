-- uses: life
-- Queue a parked request again under its id, as if it had never run. With ended = 1: one that failed, was cancelled or
-- expired, whose input is retained. KEYS: leases. ARGV: prefix, id, ended. It is detached and has no deadline, because
-- its caller has got the error. If it is resumable, it has its former input, and gets no more.
-- Returns 1, or 0 if there is no such request, or its record is too damaged to run it.
local prefix, id, is_ended = ARGV[1], ARGV[2], ARGV[3] == '1'
local retry_key = prefix .. 'retry:' .. id
local key, parked_key = prefix .. 'request:' .. id, prefix .. 'parked:' .. id
local parked = fields_of(parked_key, 'payload', 'result_ttl_ms', 'epoch', 'tenant', 'band', 'prompt', 'max', 'input',
  'webhook', 'images', 'account')
local request = fields_of(key, 'state', 'epoch', 'call')
if is_ended then
  if not ENDED[request.state] or request.state == 'finished' or request.state == 'parked' then return 0 end
  parked_key = retry_key
  parked = fields_of(key, 'tenant', 'band', 'prompt', 'max', 'webhook', 'account', 'sibling', 'ttl')
  parked.payload, parked.result_ttl_ms = attempt('GET', retry_key), parked.ttl
end
-- After its result expired, the id may have been used again.
if not parked.payload or parked.payload == '' or is_live(request.state) then return 0 end
-- The epoch continues, because an engine that still runs the parked request must not be able to write to the new one.
local epoch = whole(request.epoch) or whole(parked.epoch) or next_epoch()
local prompt, most, ttl = whole(parked.prompt) or 0, whole(parked.max) or 0, whole(parked.result_ttl_ms) or LOST_TTL_MS
local tenant = parked.tenant and parked.tenant ~= '' and parked.tenant or 'default'
local is_read, input = true, nil
if parked.input then
  is_read, input = pcall(cmsgpack.unpack, parked.input)
  if not is_read or type(input) ~= 'table' then return 0 end
end
local record = {'epoch', epoch, 'ttl', ttl, 'prompt', prompt, 'max', most}
-- The content by which it is compared (enqueue.lua), without the token of its call.
local content = request.call and string.match(request.call, ' .*')
if content then record[#record + 1], record[#record + 2] = 'call', content end
local past = attempt('HGETALL', key) or {}
for i = 1, #past, 2 do -- the events before it was parked
  if is_entry(past[i]) then record[#record + 1], record[#record + 2] = past[i], past[i + 1] end
end
redis.call('DEL', key, prefix .. 'log:' .. id, prefix .. 'input:' .. id, parked_key)
if not is_ended then redis.call('ZREM', prefix .. 'dead', id) end
local band = parked.band and has_band(prefix, parked.band) and parked.band or queue_policy(prefix).default_band
if parked.account then record[#record + 1], record[#record + 2] = 'account', parked.account end
if input then
  for _, chunk in ipairs(input) do redis.call('RPUSH', prefix .. 'input:' .. id, chunk) end
  for _, field in ipairs({'chunks', #input + 1, 'closed', 1}) do record[#record + 1] = field end
end
if parked.images then
  for _, field in ipairs({'images', parked.images}) do record[#record + 1] = field end
  hold_images(prefix, id, parked.images)
  release_images(prefix, parked_user(id), parked.images)
end
if parked.webhook then
  -- One answer of several is reported separately: the others were, when it was parked.
  for _, field in ipairs({'webhook', parked.webhook}) do record[#record + 1] = field end
end
enter_lane(prefix, id, parked.payload, tenant, band, prompt, most, nil, record, 'replayed')
count_entered(prefix)
return 1
