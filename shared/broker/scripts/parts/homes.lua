-- uses: life
-- Homes of a model: devices whose supervisors may wake it, because its engine there sleeps or has no process.
--
-- homes has the ms at which the lease of each ends, home_states its level (0 awake, 1 and 2 asleep, 3 on disk), the ms
-- that waking it takes, the ms at which it is expected to be awake (0 if unknown), and the sequences of its engine.
-- home_errors has code and message of devices that have given the model up: it does not fit, or cannot be loaded. A model
-- with another home counts as served. grants has the devices that may wake it now, by the ms at which that ends. A grant
-- saves work only: two engines of one model are always right, since claims are fenced.

-- Forget homes and their grants. Requests that must not wait end, if nothing is left that serves the model.
local function drop_homes(prefix, devices)
  for _, device in ipairs(devices) do
    redis.call('ZREM', prefix .. 'homes', device)
    redis.call('HDEL', prefix .. 'home_states', device)
    redis.call('HDEL', prefix .. 'home_errors', device)
    redis.call('ZREM', prefix .. 'grants', device)
  end
  if #devices > 0 then
    fail_unserved(prefix, 'no engine and no device is left that serves this model; the last was ' .. devices[#devices])
  end
end

-- Return the devices whose lease or grant has ended.
local function expired(prefix, kind)
  marks.cut_leases(prefix, kind)
  return redis.call('ZRANGEBYSCORE', prefix .. kind, '-inf', now_ms(), 'LIMIT', 0, MAX_HOMES)
end

-- Forget homes whose lease has ended, and grants that have ended.
local function drop_expired_homes(prefix)
  drop_homes(prefix, expired(prefix, 'homes'))
  for _, device in ipairs(expired(prefix, 'grants')) do redis.call('ZREM', prefix .. 'grants', device) end
end

-- Return the live homes as lists of device, level, ms to wake, ms until it is awake (-1 if unknown), sequences, and the
-- error if it has given the model up ('' if not).
local function live_homes(prefix)
  local homes = {}
  for _, device in ipairs(redis.call('ZRANGEBYSCORE', prefix .. 'homes', now_ms(), '+inf', 'LIMIT', 0, MAX_HOMES)) do
    local state = redis.call('HGET', prefix .. 'home_states', device) or ''
    local level, wake_ms, ready_at, seqs = string.match(state, '^(%d+) (%d+) ?(%d*) ?(%d*)$')
    ready_at = tonumber(ready_at or '') or 0
    homes[#homes + 1] = {device, tonumber(level or 3), tonumber(wake_ms or 0),
      ready_at > 0 and math.max(0, ready_at - now_ms()) or -1, tonumber(seqs or '') or 0,
      redis.call('HGET', prefix .. 'home_errors', device) or ''}
  end
  return homes
end

-- Return the number of engines that are awake. One that has just woken claims a moment later than its home reports it.
local function num_awake(prefix)
  local num = 0
  for _, home in ipairs(live_homes(prefix)) do num = num + (home[2] == 0 and 1 or 0) end
  local engines = capacity_of_others(prefix, '')
  return math.max(num, engines and engines.num or 0)
end

-- Return what may serve the model: its live homes, the devices that wake it, and the number of engines with a lease.
local function readiness(prefix)
  return {live_homes(prefix), redis.call('ZRANGEBYSCORE', prefix .. 'grants', now_ms(), '+inf', 'LIMIT', 0, MAX_HOMES),
    redis.call('ZCOUNT', prefix .. 'leases', now_ms(), '+inf')}
end

-- End waiting requests if every home has given the model up, at most this many. Their callers get the error.
local function fail_given_up(prefix, most)
  local home_error = given_up(prefix)
  if not home_error then return end
  local code, message = string.match(home_error, '^(%S+) ?(.*)$')
  local function fail(id) end_request(prefix, id, 'failed', 'error', code, message) end
  for line in pairs(LINES) do
    for _, id in ipairs(redis.call('LRANGE', prefix .. line, 0, most - 1)) do fail(id) end
  end
  for _, tenant in ipairs(redis.call('SMEMBERS', prefix .. 'active')) do
    for _, band in ipairs(queue_policy(prefix).bands) do most = most - end_lane(prefix, tenant, band, most, fail) end
  end
end

-- Return by band the ms since which requests wait that were claimed before. Only the first ones of each list are read.
local MAX_RETURNED_READ = 64
local function oldest_returned(prefix)
  local oldest = {}
  for line in pairs(LINES) do
    for _, id in ipairs(redis.call('LRANGE', prefix .. line, 0, MAX_RETURNED_READ - 1)) do
      local request = fields_of(prefix .. 'request:' .. id, 'band', 'held_at')
      local at = whole(request.held_at)
      if request.band and at then oldest[request.band] = math.min(oldest[request.band] or at, at) end
    end
  end
  return oldest
end

-- Return by band the ms since which the oldest request waits that an engine could claim. Bands without one are absent.
local function oldest_by_band(prefix)
  local oldest = oldest_returned(prefix)
  for _, band in ipairs(queue_policy(prefix).bands) do
    local head = redis.call('ZRANGE', prefix .. 'heads:' .. band, 0, 0, 'WITHSCORES')[2]
    if head then oldest[band] = math.min(oldest[band] or math.huge, tonumber(head)) end
  end
  return oldest
end
