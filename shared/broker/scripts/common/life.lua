-- How a request ends, or waits for its next engine.

local RATE_WINDOW_MS = 30000

-- The measured service rate, in "queue": requests, tokens (prompt and most output, as waiting ones are counted) and ms
-- in which any request was under way, fading by e every half minute; and the mean output of a request.
local function note_served(prefix, tokens, output_tokens)
  local key, now = prefix .. 'queue', now_ms()
  local rate = fields(key, 'rate_at', 'rate_ms', 'rate_requests', 'rate_tokens', 'mean_output')
  local elapsed = math.max(0, now - amount(rate.rate_at or now))
  local fade = math.exp(-elapsed / RATE_WINDOW_MS)
  redis.call('HSET', key, 'rate_at', now, 'rate_ms', amount(rate.rate_ms) * fade + elapsed,
    'rate_requests', amount(rate.rate_requests) * fade + 1, 'rate_tokens', amount(rate.rate_tokens) * fade + tokens,
    'mean_output', rate.mean_output and rate.mean_output * 0.98 + output_tokens * 0.02 or output_tokens)
end

-- Charge a tenant what was computed of a request instead of what was charged so far; returns the difference.
local function charge_computed(prefix, tenant, band, computed, charged, charged_at)
  local extra = computed - charged
  if extra ~= 0 then charge(prefix, band, tenant, extra) end
  if has_rate_quota(tenant_policy(prefix, tenant)) and extra ~= 0 then
    use(prefix, tenant, 0, extra, extra > 0 and now_ms() or charged_at)
  end
  return extra
end

-- One request less is under way; while none is, the time does not count as slow service.
local function stop_working(prefix)
  local num_started = redis.call('HINCRBY', prefix .. 'queue', 'num_started', -1)
  if num_started <= 0 then
    redis.call('HSET', prefix .. 'queue', 'idle_at', now_ms())
    -- What a damaged list has lost was not counted any more.
    if num_started < 0 then redis.call('HSET', prefix .. 'queue', 'num_started', 0) end
  end
end

-- Count anew what each tenant has under way: a damaged record named another tenant. What awaits input is in no list, so
-- while there is any, the tenants' counts are left for later. Returns how many there are in all but those.
local function recount_started(prefix)
  local counts, num_started = {}, 0
  local function count(ids)
    for _, id in ipairs(ids) do
      local now = fields_of(prefix .. 'request:' .. id, 'state', 'tenant')
      local tenant = now.tenant or LOST_TENANT
      if not ENDED[now.state] then counts[tenant], num_started = (counts[tenant] or 0) + 1, num_started + 1 end
    end
  end
  for _, engine in ipairs(engines_of(prefix)) do count(attempt('HKEYS', prefix .. 'claims:' .. engine) or {}) end
  for line in pairs(LINES) do count(redis.call('LRANGE', prefix .. line, 0, -1)) end
  if amount(redis.call('HGET', prefix .. 'queue', 'num_awaiting')) > 0 then return num_started end
  for tenant in pairs(counts) do redis.call('SADD', prefix .. 'active', tenant) end
  for _, tenant in ipairs(redis.call('SMEMBERS', prefix .. 'active')) do
    redis.call('HSET', prefix .. 'tenant:' .. tenant, 'num_started', counts[tenant] or 0)
    forget_idle(prefix, tenant)
  end
  return num_started
end

-- A request that was claimed has ended.
local function settle(prefix, tenant, band, prompt, most, count, charged, charged_at)
  local extra = charge_computed(prefix, tenant, band, prompt + count, charged, charged_at)
  if redis.call('HINCRBY', prefix .. 'tenant:' .. tenant, 'num_started', -1) < 0 then
    redis.call('HSET', prefix .. 'tenant:' .. tenant, 'num_started', 0)
    recount_started(prefix)
  end
  stop_working(prefix)
  note_served(prefix, prompt + most, count)
  local blocked = redis.call('ZSCORE', prefix .. 'blocked', tenant)
  if blocked and (blocked == 'inf' or extra < 0) then unblock(prefix, tenant) end
end

-- A request that awaited input goes on, or ends: it counts as started again. While it was the only one that had been,
-- nothing was under way.
local function leave_awaiting(prefix, key)
  local queue, now = prefix .. 'queue', now_ms()
  redis.call('HDEL', key, 'ending')
  redis.call('HINCRBY', queue, 'num_awaiting', -1)
  if redis.call('HINCRBY', queue, 'num_started', 1) > 1 then return end
  local last = fields(queue, 'rate_at', 'idle_at')
  redis.call('HSET', queue, 'rate_at', math.min(now, tonumber(last.rate_at) + now - tonumber(last.idle_at)))
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

-- A request leaves the claims of its engine, whatever its record calls that.
local function leave_claims(prefix, engine, id)
  if engine and attempt('HDEL', prefix .. 'claims:' .. engine, id) == 1 then return end
  local holder = holder_of(prefix, id)
  if holder then redis.call('HDEL', prefix .. 'claims:' .. holder, id) end
end

-- The event of an end, as note_move.
local function note_end_move(prefix, id, state, now, cause)
  local arrived = now.entry and arrival_ms(now.entry) or whole(now.arrived_at) or now_ms()
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

-- Give a request its last state: it leaves its line, its tenant is charged, hash and log begin to expire. cause says why,
-- for people.
local function close_request(prefix, key, id, state, cause)
  local function read()
    local now = fields(key, 'state', 'ttl', 'engine', 'client', 'fail_fast', 'entry', 'line', 'deadline', 'charged',
      'tenant', 'band', 'prompt', 'max', 'count', 'charged_at', 'chunks', 'ending', 'webhook', 'webhook_of', 'webhook_n', 'warm', 'attempts',
      'arrived_at', 'images')
    local is_placed = now.entry and is_entry(now.entry) or not now.entry and whole(now.charged) and whole(now.charged_at)
    local is_sound = is_placed and is_live(now.state) and (not now.line or LINES[now.line]) and whole(now.ttl)
      and whole(now.prompt) and whole(now.max) and whole(now.count) and now.tenant and now.band
      and (not now.webhook_of or whole(now.webhook_n))
    return now, is_sound
  end
  local now, is_sound = read()
  if not is_sound then
    mend_request(prefix, id)
    now = read()
  end
  move(key, now.state, state, note_end_move(prefix, id, state, now, cause))
  redis.call('HDEL', key, 'entry', 'line')
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
  if now.engine then leave_claims(prefix, now.engine, id) end
  if now.client then redis.call('SREM', prefix .. 'client:' .. now.client, id) end
  if now.fail_fast then redis.call('SREM', prefix .. 'fail_fast', id) end
  if now.deadline then redis.call('ZREM', prefix .. 'deadlines', id) end
  local tenant, band, prompt, most = now.tenant, now.band, tonumber(now.prompt), tonumber(now.max)
  if now.entry then
    leave_lane(prefix, now.entry, tenant, band, prompt + most, now.deadline)
    tidy_lane(prefix, band, tenant)
    return forget_idle(prefix, tenant)
  end
  if now.line then redis.call('LREM', prefix .. now.line, 1, id) end
  local has_started = redis.call('DEL', prefix .. 'payload:' .. id) == 1 or now.engine or now.line or now.ending
  -- Else a damaged record has lost its place in a lane.
  if has_started then
    settle(prefix, tenant, band, prompt, most, tonumber(now.count), tonumber(now.charged), tonumber(now.charged_at))
  end
  forget_idle(prefix, tenant)
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
