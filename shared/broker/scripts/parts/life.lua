-- uses: settling, images
-- How a request ends, or is queued again.

-- End the wait of a request for input: it continues or ends, so it counts as started again. While it was the only
-- started request, none was running.
local function leave_awaiting(prefix, key)
  local queue, time_ms = prefix .. 'queue', now_ms()
  redis.call('HDEL', key, 'ending')
  service.count_held_time(prefix)
  redis.call('HINCRBY', queue, 'num_awaiting', -1)
  if redis.call('HINCRBY', queue, 'num_started', 1) > 1 then return end
  local last = fields(queue, 'rate_at', 'idle_at')
  local idle_ms = math.max(0, time_ms - tonumber(last.idle_at))
  redis.call('HSET', queue, 'rate_at', marks.cut(tonumber(last.rate_at) + idle_ms, 0))
end

-- Put the end of a request into the outbox, where a jobs process reads it, so it is as durable as the end itself. The
-- ends of several answers to one request are collected and reported together with the last one.
local ENDS_TTL_MS = 30 * 24 * 3600 * 1000
local function write_outbox(prefix, id, state, target, request_id, num_answers)
  local fields = {'state:' .. id, state, 'record:' .. id, redis.call('LINDEX', prefix .. 'log:' .. id, -1)}
  if request_id then
    local ends = prefix .. 'ends:' .. request_id
    redis.call('HSET', ends, unpack(fields))
    redis.call('PEXPIRE', ends, ENDS_TTL_MS)
    if redis.call('HLEN', ends) < 2 * tonumber(num_answers) then return end
    fields = redis.call('HGETALL', ends)
    redis.call('DEL', ends)
  end
  local epoch = redis.call('HGET', prefix .. 'request:' .. id, 'epoch')
  local event = 'evt_' .. redis.sha1hex(table.concat({prefix, id, epoch, now_ms()}, ' '))
  redis.call('XADD', prefix .. 'outbox', '*', 'event', event, 'ended_at', now_ms(), 'target', target,
    'request', request_id or id, unpack(fields))
end

-- Write the event of an end. Returns as note_move.
local function note_end_move(prefix, id, state, request, cause)
  local arrived = request.entry and arrival_ms(prefix, request.entry, id) or whole(request.arrived_at) or now_ms()
  local started = request.charged_at and tonumber(request.charged_at) or now_ms()
  return note_move(prefix, id, request.tenant, request.band, state, request.count, request.engine or '', cause_line(cause) .. '\n'
    .. (request.attempts or 0) .. '\n' .. request.prompt .. '\n' .. request.max .. '\n' .. math.max(0, started - arrived) .. '\n'
    .. math.max(0, now_ms() - started))
end

local function is_sound_end(request)
  local is_placed = request.entry and is_entry(request.entry) or not request.entry and whole(request.charged) and whole(request.charged_at)
  return is_placed and is_live(request.state) and (not request.line or LINES[request.line]) and whole(request.ttl)
    and whole(request.prompt) and whole(request.max) and whole(request.count) and request.tenant and request.band
    and (not request.webhook_of or whole(request.webhook_n))
end

-- Remove an ended request from all lists. Call settle_ends next.
local function leave_all(prefix, id, request)
  local tenant, band, prompt, most = request.tenant, request.band, tonumber(request.prompt), tonumber(request.max)
  begin_settling(tenant)
  if request.engine then remove_later('HDEL', prefix .. 'claims:' .. request.engine, id) end
  if request.client then remove_later('SREM', prefix .. 'client:' .. request.client, id) end
  if request.fail_fast then remove_later('SREM', prefix .. 'fail_fast', id) end
  if request.deadline then remove_later('ZREM', prefix .. 'deadlines', id) end
  if request.entry then
    leave_lane(prefix, request.entry, tenant, band, prompt + most, request.deadline)
    return tidy_lane(prefix, band, tenant)
  end
  if request.line then
    service.count_held_time(prefix)
    redis.call('LREM', prefix .. request.line, 1, id)
  end
  ends.payloads[#ends.payloads + 1] = prefix .. 'payload:' .. id
  local has_started = request.engine or request.line or request.ending or redis.call('EXISTS', prefix .. 'payload:' .. id) == 1
  -- Otherwise a damaged record has lost its place in a lane.
  if has_started then settle_claimed(prefix, request, prompt, most) end
end

-- Set the last state of a request: it leaves its line, and its hash and log begin to expire. cause is the reason, for
-- people. request has its fields, if they were read; then settle_ends also writes the ledger. Otherwise it is
-- written here, because nothing that fails after the move may prevent it. settle_ends writes the effects on shared state.
local function close_unsettled(prefix, key, id, state, cause, request)
  local is_one_of_many = request
  request = request or all_fields_of(key)
  if not is_sound_end(request) then
    mend_request(prefix, id)
    request = all_fields_of(key)
  end
  move(key, request.state, state, note_end_move(prefix, id, state, request, cause))
  open_ledger().count(request, state)
  if not is_one_of_many then open_ledger().write(prefix) end
  if request.entry or request.line then redis.call('HDEL', key, 'entry', 'line') end
  if request.warm then
    redis.call('HDEL', key, 'warm')
    attempt('ZREM', prefix .. 'warm_for:' .. request.warm, id)
  end
  if request.webhook then write_outbox(prefix, id, state, request.webhook, request.webhook_of, request.webhook_n) end
  redis.call('PEXPIRE', key, request.ttl)
  redis.call('PEXPIRE', prefix .. 'log:' .. id, request.ttl)
  if request.chunks then redis.call('PEXPIRE', prefix .. 'input:' .. id, request.ttl) end
  if request.images then release_images(prefix, id, request.images) end
  if state ~= 'finished' and state ~= 'parked' then
    -- The input of a detached request is retained for as long as its record, so that an operator may retry it. Images
    -- and later parts of a prompt are not retained. A former request of this id may have left an input.
    local kept, input = prefix .. 'retry:' .. id, nil
    if not (request.client or request.images or request.chunks) then
      local lane = lane_key(prefix, request.band, request.tenant)
      local head = request.entry and (attempt('XRANGE', lane, request.entry, request.entry) or {})[1]
      input = head and head[2][4] or attempt('GET', prefix .. 'payload:' .. id)
    end
    if not (input and attempt('SET', kept, input, 'PX', request.ttl)) then redis.call('DEL', kept) end
  end
  if request.ending then leave_awaiting(prefix, key) end
  leave_all(prefix, id, request)
end

-- End one request and settle it immediately.
local function close_request(prefix, key, id, state, cause)
  close_unsettled(prefix, key, id, state, cause)
  settle_ends(prefix)
end

-- Count an end that no engine counts; the series get it with the next sample.
local function count_end(prefix, state) redis.call('HINCRBY', prefix .. 'queue', 'ended:' .. state, 1) end

-- Write the end of a request that no engine ends. The increased epoch refuses the writes of an engine that still runs
-- it. code and message become the error of its caller; without them the end is not an error. cause is for its event;
-- the default is code or reason. A request that has ended, but that a damaged record has left in a list, does not end
-- again.
local function end_request(prefix, id, state, reason, code, message, cause)
  local key = prefix .. 'request:' .. id
  local request = fields_of(key, 'state', 'count', 'epoch')
  if ENDED[request.state] or not request.state and not is_somewhere(prefix, id) then return end
  local count = whole(request.count)
  if not (MOVES[request.state] and count and whole(request.epoch)) then
    mend_request(prefix, id)
    count = tonumber(redis.call('HGET', key, 'count'))
  end
  redis.call('HINCRBY', key, 'epoch', 1)
  local delta = {1, count, {}, '', reason}
  if code then
    delta[6] = cjson.null -- stop_reason; packed as nil
    delta[7] = {code, message}
  end
  local record = cmsgpack.pack(delta)
  if not emit(prefix, key, id, record, count) then
    redis.call('DEL', prefix .. 'log:' .. id)
    emit(prefix, key, id, record, count)
  end
  close_request(prefix, key, id, state, cause or code or reason)
  count_end(prefix, state)
end

-- End the requests of a lane by end_one, which gets the id of each, at most this many. Returns how many.
local function end_lane(prefix, tenant, band, most, end_one)
  local num_ended = 0
  while num_ended < most do
    local head = redis.call('XRANGE', lane_key(prefix, band, tenant), '-', '+', 'COUNT', 1)[1]
    if not head then break end
    local entry, content = unpack(head)
    local id = content[1] == 'id' and content[2]
    local standing = id and standing_of(prefix, id, entry)
    if standing == 'lost' then mend_request(prefix, id, {tenant = tenant, band = band, entry = entry}) end
    if standing and standing ~= 'stray' then
      end_one(id)
      num_ended = num_ended + 1
    end
    -- Still there if something else wrote it, or its record names another lane.
    if redis.call('XRANGE', lane_key(prefix, band, tenant), entry, entry)[1] then
      drop_entry(prefix, entry, tenant, band)
    end
  end
  return num_ended
end

-- Tell the engine that runs a request, if any, to stop computing it.
local function tell_engine(prefix, engine, id)
  if engine then redis.call('PUBLISH', prefix .. 'engine:' .. engine .. ':commands', cmsgpack.pack({'cancel', id})) end
end

-- End a live request from outside, and tell its engine.
local function stop_request(prefix, id, state)
  local engine = fields_of(prefix .. 'request:' .. id, 'engine').engine
  end_request(prefix, id, state, state)
  tell_engine(prefix, engine, id)
end

-- Queue a claimed request again: at the end of "returned", or of "suspects", which run alone. kind and cause are those
-- of its event.
local function put_back(prefix, key, id, line, kind, cause)
  service.count_released(prefix, key)
  redis.call('RPUSH', prefix .. line, id) -- first, so that the request stays where it is if this fails
  local request = fields(key, 'engine', 'tenant', 'band', 'count', 'past')
  leave_claims(prefix, request.engine, id)
  move(key, 'claimed', 'queued', 'line', line, note_move(prefix, id, request.tenant or '', request.band or '', kind,
    request.count or 0, request.engine or '', cause_line(cause)))
  redis.call('HDEL', key, 'engine')
  if kind == 'reclaimed' then
    local past = {open_ledger().books().read_past(request.past)}
    past[5] = whole(request.count) or 0
    redis.call('HSET', key, 'past', table.concat(past, ' '))
  end
  wake_engines(prefix, 1)
end

-- Move a request to the dead letter; its caller gets the error. cause is an encoded DeathCause. payload is nil if the
-- request was claimed before, since it is then in payload:ID.
local function park(prefix, id, cause, reason, code, message, payload)
  local key, parked, parked_at = prefix .. 'request:' .. id, prefix .. 'parked:' .. id, now_ms()
  local request = fields(key, 'attempts', 'deaths', 'count', 'ttl', 'epoch', 'engine', 'tenant', 'band', 'prompt', 'max',
    'chunks', 'webhook', 'images', 'account')
  if request.chunks then
    local input = redis.call('LRANGE', prefix .. 'input:' .. id, 0, -1)
    redis.call('HSET', parked, 'input', cmsgpack.pack(input))
  end
  for _, field in ipairs({'webhook', 'account'}) do
    if request[field] then redis.call('HSET', parked, field, request[field]) end
  end
  if request.images then
    redis.call('HSET', parked, 'images', request.images)
    hold_images(prefix, parked_user(id), request.images)
  end
  payload = payload or redis.call('GET', prefix .. 'payload:' .. id) or ''
  redis.call('HSET', parked, 'payload', payload, 'cause', cause,
    'deliveries', request.attempts or 0, 'deaths', request.deaths or 0, 'num_output_tokens', request.count,
    'result_ttl_ms', request.ttl, 'epoch', request.epoch + 1, 'engine', request.engine or '', 'tenant', request.tenant,
    'band', request.band, 'prompt', request.prompt, 'max', request.max, 'parked_at_ms', parked_at)
  redis.call('ZADD', prefix .. 'dead', parked_at, id)
  end_request(prefix, id, 'parked', reason, code, message, code .. ': ' .. words_of(cause))
end

-- Park a request whose record in Redis is damaged. own is as in mend_request, and may have its payload.
local function set_aside(prefix, id, own)
  own = own or {}
  local damage = mend_request(prefix, id, own)
  if damage == '' then damage = own.damage or 'its keys do not fit together' end
  local message = 'the record of this request in Redis was damaged from outside (' .. damage
    .. '), so it cannot continue; it is parked: see penstock dead show ' .. id
  local engine = fields_of(prefix .. 'request:' .. id, 'engine').engine or ''
  park(prefix, id, cmsgpack.pack({1, engine, message}), 'error', 'damaged_record', message, own.payload)
  tell_engine(prefix, engine ~= '' and engine, id)
end

-- Return the number of output tokens that a suspect generates alone before it is cleared; more each time it was cleared
-- too early.
local function probation_tokens(acquittals)
  return 8 * 4 ^ math.min(whole(acquittals) or 0, 10)
end

-- End the requests that must not wait for an engine, if there is none.
local function fail_unserved(prefix, message)
  if is_served(prefix) then return end
  for _, id in ipairs(redis.call('SMEMBERS', prefix .. 'fail_fast')) do
    end_request(prefix, id, 'failed', 'engine_lost', 'engine_dead', message)
  end
  redis.call('DEL', prefix .. 'fail_fast')
end

-- End requests that are past their deadline: waiting ones immediately, running ones after grace_ms, because their
-- engine does it better. Returns how many.
local function expire_due(prefix, most, grace_ms)
  local time_ms, num_expired = now_ms(), 0
  local due = redis.call('ZRANGEBYSCORE', prefix .. 'deadlines', '-inf', time_ms, 'WITHSCORES', 'LIMIT', 0, most)
  for i = 1, #due, 2 do
    local id = due[i]
    local state = fields_of(prefix .. 'request:' .. id, 'state').state
    if is_live(state) and (state ~= 'claimed' or time_ms - tonumber(due[i + 1]) >= grace_ms) then
      stop_request(prefix, id, 'expired')
      num_expired = num_expired + 1
    elseif ENDED[state] or not state and not is_somewhere(prefix, id) then
      redis.call('ZREM', prefix .. 'deadlines', id)
    elseif state ~= 'claimed' then
      set_aside(prefix, id)
    end
  end
  return num_expired
end
