-- How a request ends, or waits for its next engine.

local RATE_WINDOW_MS = 30000

-- The measured service rate, in "queue": requests, tokens (prompt and most output, as waiting ones are counted) and ms
-- in which any request was under way, fading by e every half minute; and the mean output of a request.
local function note_served(prefix, tokens, output_tokens)
  local key, now = prefix .. 'queue', now_ms()
  local rate = redis.call('HMGET', key, 'rate_at', 'rate_ms', 'rate_requests', 'rate_tokens', 'mean_output')
  local elapsed = math.max(0, now - tonumber(rate[1] or now))
  local fade = math.exp(-elapsed / RATE_WINDOW_MS)
  redis.call('HSET', key, 'rate_at', now, 'rate_ms', tonumber(rate[2] or 0) * fade + elapsed,
    'rate_requests', tonumber(rate[3] or 0) * fade + 1, 'rate_tokens', tonumber(rate[4] or 0) * fade + tokens,
    'mean_output', rate[5] and rate[5] * 0.98 + output_tokens * 0.02 or output_tokens)
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
  if redis.call('HINCRBY', prefix .. 'queue', 'num_started', -1) == 0 then
    redis.call('HSET', prefix .. 'queue', 'idle_at', now_ms())
  end
end

-- A request that was claimed has ended.
local function settle(prefix, tenant, band, prompt, most, count, charged, charged_at)
  local extra = charge_computed(prefix, tenant, band, prompt + count, charged, charged_at)
  redis.call('HINCRBY', prefix .. 'tenant:' .. tenant, 'num_started', -1)
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
  local at = redis.call('HMGET', queue, 'rate_at', 'idle_at')
  redis.call('HSET', queue, 'rate_at', math.min(now, tonumber(at[1]) + now - tonumber(at[2])))
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

-- Give a request its last state: it leaves its line, its tenant is charged, hash and log begin to expire.
local function close_request(prefix, key, id, state)
  local now = redis.call('HMGET', key, 'ttl', 'engine', 'client', 'fail_fast', 'entry', 'line', 'deadline', 'charged',
    'tenant', 'band', 'prompt', 'max', 'count', 'charged_at', 'chunks', 'ending', 'webhook', 'webhook_of', 'webhook_n')
  redis.call('HSET', key, 'state', state)
  redis.call('HDEL', key, 'entry', 'line')
  if now[17] then note_end(prefix, id, state, now[17], now[18], now[19]) end
  redis.call('PEXPIRE', key, now[1])
  redis.call('PEXPIRE', prefix .. 'log:' .. id, now[1])
  if now[15] then redis.call('PEXPIRE', prefix .. 'input:' .. id, now[1]) end
  if now[16] then leave_awaiting(prefix, key) end
  if now[2] then redis.call('HDEL', prefix .. 'claims:' .. now[2], id) end
  if now[3] then redis.call('SREM', prefix .. 'client:' .. now[3], id) end
  if now[4] then redis.call('SREM', prefix .. 'fail_fast', id) end
  if now[7] then redis.call('ZREM', prefix .. 'deadlines', id) end
  local tenant, band, prompt, most = now[9], now[10], tonumber(now[11]), tonumber(now[12])
  if now[5] then
    leave_lane(prefix, now[5], tenant, band, prompt + most, now[7])
    tidy_lane(prefix, band, tenant)
  else
    if now[6] then redis.call('LREM', prefix .. now[6], 1, id) end
    redis.call('DEL', prefix .. 'payload:' .. id)
    settle(prefix, tenant, band, prompt, most, tonumber(now[13]), tonumber(now[8]), tonumber(now[14]))
  end
  forget_idle(prefix, tenant)
end

-- Write the end of a request that no engine writes. The raised epoch refuses whoever still runs it.
-- code and message become the error that its caller gets; without them the end is no error.
local function end_request(prefix, id, state, reason, code, message)
  local key = prefix .. 'request:' .. id
  local count = tonumber(redis.call('HGET', key, 'count'))
  redis.call('HINCRBY', key, 'epoch', 1)
  local delta = {1, count, {}, '', reason}
  if code then
    delta[6] = cjson.null -- stop_reason; packed as nil
    delta[7] = {code, message}
  end
  emit(prefix, key, id, cmsgpack.pack(delta), count)
  close_request(prefix, key, id, state)
end

-- Tell the engine that runs a request, if one does, to stop computing it.
local function tell_engine(prefix, engine, id)
  if engine then redis.call('PUBLISH', prefix .. 'engine:' .. engine .. ':commands', cmsgpack.pack({'cancel', id})) end
end

-- End a request that has not ended, from outside, and tell its engine.
local function stop_request(prefix, id, state)
  local engine = redis.call('HGET', prefix .. 'request:' .. id, 'engine')
  end_request(prefix, id, state, state)
  tell_engine(prefix, engine, id)
end

-- Put a claimed request back in line: at the end of "returned", or of "suspects", which run alone.
local function put_back(prefix, key, id, line)
  redis.call('HDEL', prefix .. 'claims:' .. redis.call('HGET', key, 'engine'), id)
  redis.call('HSET', key, 'state', 'queued', 'line', line)
  redis.call('HDEL', key, 'engine')
  redis.call('RPUSH', prefix .. line, id)
  redis.call('PUBLISH', prefix .. 'wake', id)
end

-- Move a claimed request to the dead letter; its caller gets the error. cause is an encoded DeathCause.
local function park(prefix, id, cause, reason, code, message)
  local key, parked, parked_at = prefix .. 'request:' .. id, prefix .. 'parked:' .. id, now_ms()
  local request = redis.call('HMGET', key, 'attempts', 'deaths', 'count', 'ttl', 'epoch', 'engine', 'tenant', 'band',
    'prompt', 'max', 'chunks', 'webhook')
  if request[11] then
    local input = redis.call('LRANGE', prefix .. 'input:' .. id, 0, -1)
    redis.call('HSET', parked, 'input', cmsgpack.pack(input))
  end
  if request[12] then redis.call('HSET', parked, 'webhook', request[12]) end
  redis.call('HSET', parked, 'payload', redis.call('GET', prefix .. 'payload:' .. id), 'cause', cause,
    'deliveries', request[1], 'deaths', request[2] or 0, 'num_output_tokens', request[3], 'result_ttl_ms', request[4],
    'epoch', request[5] + 1, 'engine', request[6], 'tenant', request[7], 'band', request[8], 'prompt', request[9],
    'max', request[10], 'parked_at_ms', parked_at)
  redis.call('ZADD', prefix .. 'dead', parked_at, id)
  end_request(prefix, id, 'parked', reason, code, message)
end

-- Output tokens that a suspect makes alone before it is cleared; more after each time that it was cleared too early.
local function probation_tokens(acquittals)
  return 8 * 4 ^ tonumber(acquittals or 0)
end

-- End the requests that were not to wait for an engine, if there is none.
local function fail_unserved(prefix, message)
  if is_served(prefix) then return end
  for _, id in ipairs(redis.call('SMEMBERS', prefix .. 'fail_fast')) do
    end_request(prefix, id, 'failed', 'engine_lost', 'engine_dead', message)
  end
end

-- End what is past its deadline: what waits at once, what runs after grace_ms, since its engine does it better. Returns
-- how many.
local function expire_due(prefix, most, grace_ms)
  local now, num_expired = now_ms(), 0
  local due = redis.call('ZRANGEBYSCORE', prefix .. 'deadlines', '-inf', now, 'WITHSCORES', 'LIMIT', 0, most)
  for i = 1, #due, 2 do
    local id = due[i]
    local state = redis.call('HGET', prefix .. 'request:' .. id, 'state')
    if state == 'queued' or state == 'awaiting_input' or (state == 'claimed' and now - tonumber(due[i + 1]) >= grace_ms) then
      stop_request(prefix, id, 'expired')
      num_expired = num_expired + 1
    end
  end
  return num_expired
end
