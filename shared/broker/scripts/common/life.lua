-- How a request ends, or waits for its next engine.

-- A request that awaited input goes on, or ends: it counts as started again. While it was the only one that had been,
-- nothing was under way.
local function leave_awaiting(prefix, key)
  local queue, now = prefix .. 'queue', now_ms()
  redis.call('HDEL', key, 'ending')
  service.note_under_way(prefix)
  redis.call('HINCRBY', queue, 'num_awaiting', -1)
  if redis.call('HINCRBY', queue, 'num_started', 1) > 1 then return end
  local last = fields(queue, 'rate_at', 'idle_at')
  local idle_ms = math.max(0, now - tonumber(last.idle_at))
  redis.call('HSET', queue, 'rate_at', marks.cut(tonumber(last.rate_at) + idle_ms, 0))
end

-- Put the end of a request into the outbox, where a jobs process finds it: so it is known as surely as the end itself.
-- The ends of several answers to one request are gathered, and told together with the last.
local ENDS_TTL_MS = 30 * 24 * 3600 * 1000
local function note_end(prefix, id, state, target, of, num_answers)
  local fields = {'state:' .. id, state, 'record:' .. id, redis.call('LINDEX', prefix .. 'log:' .. id, -1)}
  if of then
    local ends = prefix .. 'ends:' .. of
    redis.call('HSET', ends, unpack(fields))
    redis.call('PEXPIRE', ends, ENDS_TTL_MS)
    if redis.call('HLEN', ends) < 2 * tonumber(num_answers) then return end
    fields = redis.call('HGETALL', ends)
    redis.call('DEL', ends)
  end
  local epoch = redis.call('HGET', prefix .. 'request:' .. id, 'epoch')
  local event = 'evt_' .. redis.sha1hex(table.concat({prefix, id, epoch, now_ms()}, ' '))
  redis.call('XADD', prefix .. 'outbox', '*', 'event', event, 'ended_at', now_ms(), 'target', target, 'request', of or id,
    unpack(fields))
end

-- The event of an end, as note_move.
local function note_end_move(prefix, id, state, now, cause)
  local arrived = now.entry and arrival_ms(prefix, now.entry, id) or whole(now.arrived_at) or now_ms()
  local started = now.charged_at and tonumber(now.charged_at) or now_ms()
  return note_move(prefix, id, now.tenant, now.band, state, now.count, now.engine or '', cause_line(cause) .. '\n'
    .. (now.attempts or 0) .. '\n' .. now.prompt .. '\n' .. now.max .. '\n' .. math.max(0, started - arrived) .. '\n'
    .. math.max(0, now_ms() - started))
end

-- Images of requests lie beside them, once each, as long as somebody needs them. images are digests, as words; user is a
-- request's id, or of one in the dead letter that of parked_user.
local function parked_user(id) return '{parked}' .. id end

local function hold_images(prefix, user, images)
  for digest in string.gmatch(images, '%S+') do redis.call('SADD', prefix .. 'image_users:' .. digest, user) end
end

local function let_images_go(prefix, user, images)
  for digest in string.gmatch(images, '%S+') do
    local users = prefix .. 'image_users:' .. digest
    attempt('SREM', users, user)
    if attempt('SCARD', users) == 0 then redis.call('DEL', prefix .. 'image:' .. digest) end
  end
end

-- All that is to be known of a request that ends.
local ENDING_FIELDS = {'epoch', 'state', 'ttl', 'engine', 'client', 'fail_fast', 'entry', 'line', 'deadline', 'charged',
  'tenant', 'band', 'prompt', 'max', 'count', 'charged_at', 'chunks', 'ending', 'webhook', 'webhook_of', 'webhook_n',
  'warm', 'attempts', 'arrived_at', 'images', 'held_at', 'held_ms'}

local function is_sound_end(now)
  local is_placed = now.entry and is_entry(now.entry) or not now.entry and whole(now.charged) and whole(now.charged_at)
  return is_placed and is_live(now.state) and (not now.line or LINES[now.line]) and whole(now.ttl)
    and whole(now.prompt) and whole(now.max) and whole(now.count) and now.tenant and now.band
    and (not now.webhook_of or whole(now.webhook_n))
end

-- Take an ended request out of all that it stands in; settle_ends comes next.
local function leave_all(prefix, id, now)
  local tenant, band, prompt, most = now.tenant, now.band, tonumber(now.prompt), tonumber(now.max)
  begin_settling(tenant)
  if now.engine then note_leaving('HDEL', prefix .. 'claims:' .. now.engine, id) end
  if now.client then note_leaving('SREM', prefix .. 'client:' .. now.client, id) end
  if now.fail_fast then note_leaving('SREM', prefix .. 'fail_fast', id) end
  if now.deadline then note_leaving('ZREM', prefix .. 'deadlines', id) end
  if now.entry then
    leave_lane(prefix, now.entry, tenant, band, prompt + most, now.deadline)
    return tidy_lane(prefix, band, tenant)
  end
  if now.line then
    service.note_under_way(prefix)
    redis.call('LREM', prefix .. now.line, 1, id)
  end
  ends.payloads[#ends.payloads + 1] = prefix .. 'payload:' .. id
  local has_started = now.engine or now.line or now.ending or redis.call('EXISTS', prefix .. 'payload:' .. id) == 1
  -- Else a damaged record has lost its place in a lane.
  if has_started then note_settled(prefix, now, prompt, most) end
end

-- Give a request its last state: it leaves its line, hash and log begin to expire. cause says why, for people; now are its
-- ENDING_FIELDS, where they have been read. What all requests share is left to settle_ends.
local function close_unsettled(prefix, key, id, state, cause, now)
  now = now or fields(key, unpack(ENDING_FIELDS))
  if not is_sound_end(now) then
    mend_request(prefix, id)
    now = fields(key, unpack(ENDING_FIELDS))
  end
  move(key, now.state, state, note_end_move(prefix, id, state, now, cause))
  if now.entry or now.line then redis.call('HDEL', key, 'entry', 'line') end
  if now.warm then
    redis.call('HDEL', key, 'warm')
    attempt('ZREM', prefix .. 'warm_for:' .. now.warm, id)
  end
  if now.webhook then note_end(prefix, id, state, now.webhook, now.webhook_of, now.webhook_n) end
  redis.call('PEXPIRE', key, now.ttl)
  redis.call('PEXPIRE', prefix .. 'log:' .. id, now.ttl)
  if now.chunks then redis.call('PEXPIRE', prefix .. 'input:' .. id, now.ttl) end
  if now.images then let_images_go(prefix, id, now.images) end
  if now.ending then leave_awaiting(prefix, key) end
  leave_all(prefix, id, now)
end

-- The same of one request, settled at once.
local function close_request(prefix, key, id, state, cause)
  close_unsettled(prefix, key, id, state, cause)
  settle_ends(prefix)
end

-- An end that no engine counts; the series get it with the next sample.
local function note_uncounted_end(prefix, state) redis.call('HINCRBY', prefix .. 'queue', 'ended:' .. state, 1) end

-- Write the end of a request that no engine writes. The raised epoch refuses whoever still runs it.
-- code and message become the error that its caller gets; without them the end is no error. cause is for its event; code
-- or reason without one. One that has ended, and that
-- a damaged record has left somewhere, has no second end.
local function end_request(prefix, id, state, reason, code, message, cause)
  local key = prefix .. 'request:' .. id
  local now = fields_of(key, 'state', 'count', 'epoch')
  if ENDED[now.state] or not now.state and not is_somewhere(prefix, id) then return end
  local count = whole(now.count)
  if not (MOVES[now.state] and count and whole(now.epoch)) then
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
  note_uncounted_end(prefix, state)
end

-- Tell the engine that runs a request, if one does, to stop computing it.
local function tell_engine(prefix, engine, id)
  if engine then redis.call('PUBLISH', prefix .. 'engine:' .. engine .. ':commands', cmsgpack.pack({'cancel', id})) end
end

-- End a request that has not ended, from outside, and tell its engine.
local function stop_request(prefix, id, state)
  local engine = fields_of(prefix .. 'request:' .. id, 'engine').engine
  end_request(prefix, id, state, state)
  tell_engine(prefix, engine, id)
end

-- Put a claimed request back in line: at the end of "returned", or of "suspects", which run alone. kind and cause are those
-- of its event.
local function put_back(prefix, key, id, line, kind, cause)
  service.note_released(prefix, key)
  redis.call('RPUSH', prefix .. line, id) -- first: if that cannot be, it stays where it is
  local now = fields(key, 'engine', 'tenant', 'band', 'count')
  leave_claims(prefix, now.engine, id)
  move(key, 'claimed', 'queued', 'line', line, note_move(prefix, id, now.tenant or '', now.band or '', kind,
    now.count or 0, now.engine or '', cause_line(cause)))
  redis.call('HDEL', key, 'engine')
  wake_engines(prefix, 1)
end

-- Move a request to the dead letter; its caller gets the error. cause is an encoded DeathCause. payload is nil if it was
-- claimed once, and is found where it is then.
local function park(prefix, id, cause, reason, code, message, payload)
  local key, parked, parked_at = prefix .. 'request:' .. id, prefix .. 'parked:' .. id, now_ms()
  local request = fields(key, 'attempts', 'deaths', 'count', 'ttl', 'epoch', 'engine', 'tenant', 'band', 'prompt', 'max',
    'chunks', 'webhook', 'images')
  if request.chunks then
    local input = redis.call('LRANGE', prefix .. 'input:' .. id, 0, -1)
    redis.call('HSET', parked, 'input', cmsgpack.pack(input))
  end
  if request.webhook then redis.call('HSET', parked, 'webhook', request.webhook) end
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

-- Park a request whose record in Redis is damaged. own is as of mend_request, and may have its payload.
local function set_aside(prefix, id, own)
  own = own or {}
  local damage = mend_request(prefix, id, own)
  if damage == '' then damage = own.damage or 'what belongs to it does not fit together' end
  local message = 'the record of this request in Redis was damaged from outside (' .. damage
    .. '), so it cannot go on; it is parked: see penstock dead show ' .. id
  local engine = fields_of(prefix .. 'request:' .. id, 'engine').engine or ''
  park(prefix, id, cmsgpack.pack({1, engine, message}), 'error', 'damaged_record', message, own.payload)
  tell_engine(prefix, engine ~= '' and engine, id)
end

-- Output tokens that a suspect makes alone before it is cleared; more after each time that it was cleared too early.
local function probation_tokens(acquittals)
  return 8 * 4 ^ math.min(whole(acquittals) or 0, 10)
end

-- End the requests that were not to wait for an engine, if there is none.
local function fail_unserved(prefix, message)
  if is_served(prefix) then return end
  for _, id in ipairs(redis.call('SMEMBERS', prefix .. 'fail_fast')) do
    end_request(prefix, id, 'failed', 'engine_lost', 'engine_dead', message)
  end
  redis.call('DEL', prefix .. 'fail_fast')
end

-- End what is past its deadline: what waits at once, what runs after grace_ms, since its engine does it better. Returns
-- how many.
local function expire_due(prefix, most, grace_ms)
  local now, num_expired = now_ms(), 0
  local due = redis.call('ZRANGEBYSCORE', prefix .. 'deadlines', '-inf', now, 'WITHSCORES', 'LIMIT', 0, most)
  for i = 1, #due, 2 do
    local id = due[i]
    local state = fields_of(prefix .. 'request:' .. id, 'state').state
    if is_live(state) and (state ~= 'claimed' or now - tonumber(due[i + 1]) >= grace_ms) then
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
