-- Who may have how much: policies, and what each tenant used within the last minute.
--
-- A tenant is a hash, gone (from the set "active" too) when nothing of it waits or runs: depth:BAND and tokens:BAND wait
-- in its lanes, entered:BAND counts what ever entered, weight:BAND is what its lane counts for while there is a turn for
-- it, num_started is what was claimed and has not ended. The hash "queue" has the sums of depth:BAND, tokens:BAND and
-- weight:BAND of all tenants.
-- Usage is kept per second, so that a minute slides: "r<second>" requests and "t<second>" tokens, with their sums, from
-- second "from" on. What was used in the last 60 s is never more than the sums, which reach back 60 to 61 s. "last" is
-- the last second that anything was used in: where it is in the future, the clock has gone back, and nothing is kept.

local WINDOW_S = 60

-- A field that an older version did not write has its default. part is that of the queue's policy, if it is not all.
local function with_defaults(found, part)
  return setmetatable(found, {__index = function(_, name)
    local defaults = cjson.decode(DEFAULT_POLICY)
    found[name] = (part and defaults[part] or defaults)[name] -- once: decoding takes long
    return rawget(found, name)
  end})
end

local policy
local function queue_policy(prefix)
  if not policy then
    local found = with_defaults(cjson.decode(redis.call('GET', prefix .. 'policy') or DEFAULT_POLICY))
    for _, band in ipairs(found.bands) do
      if band == found.default_band then policy = found end
    end
    if not policy then error('the policy has no default band') end
  end
  return policy
end

local function has_band(prefix, band)
  for _, name in ipairs(queue_policy(prefix).bands) do
    if name == band then return true end
  end
  return false
end

local tenant_policies = {}
local function tenant_policy(prefix, tenant)
  local found = tenant_policies[tenant]
  if not found then
    local own = redis.call('HGET', prefix .. 'tenants', tenant)
    found = with_defaults(own and cjson.decode(own) or queue_policy(prefix).tenant, 'tenant')
    if type(found.weight) ~= 'number' then error('the policy of a tenant has no weight') end
    tenant_policies[tenant] = found
  end
  return found
end

-- A limit that is not set is null in the policy's JSON.
local function limit_of(value)
  return value == cjson.null and math.huge or value
end

local function has_rate_quota(of)
  return limit_of(of.requests_per_minute) < math.huge or limit_of(of.tokens_per_minute) < math.huge
end

-- Requests and tokens of one second; nil and 0 if there were none.
local function used_in(key, second)
  local of = fields(key, 'r' .. second, 't' .. second)
  return tonumber(of['r' .. second]), tonumber(of['t' .. second] or 0)
end

-- Forget what has left the window; returns requests and tokens used in it, and its first second.
local function used(prefix, tenant)
  local key = prefix .. 'usage:' .. tenant
  local sums = fields(key, 'from', 'requests', 'tokens', 'last')
  if not sums.from then return 0, 0, nil end
  local from, requests, tokens = whole(sums.from), whole(sums.requests), whole(sums.tokens)
  local first = math.floor(now_ms() / 1000) - WINDOW_S
  local last = whole(sums.last) or from
  if not (from and requests and tokens) or from < first - 2 * WINDOW_S or last > first + WINDOW_S then
    redis.call('DEL', key) -- written by others than scripts, or by another clock
    return 0, 0, nil
  end
  if from >= first then return requests, tokens, from end
  -- The key lives for no more than the window and a little, so there is little to walk over.
  for second = from, first - 1 do
    local num_requests, num_tokens = used_in(key, second)
    if num_requests then
      requests, tokens = requests - num_requests, tokens - num_tokens
      redis.call('HDEL', key, 'r' .. second, 't' .. second)
    end
  end
  redis.call('HSET', key, 'from', first, 'requests', requests, 'tokens', tokens)
  return requests, tokens, first
end

-- Note requests and tokens as used at ms "at"; what is older than the window is not noted.
local function use(prefix, tenant, requests, tokens, at)
  local key, second = prefix .. 'usage:' .. tenant, math.floor(marks.cut(at, 0) / 1000)
  local _, _, from = used(prefix, tenant)
  if second < (from or math.floor(now_ms() / 1000) - WINDOW_S) then return end
  if not from then redis.call('HSET', key, 'from', second) end
  redis.call('HSET', key, 'last', math.floor(now_ms() / 1000))
  redis.call('HINCRBY', key, 'requests', requests)
  redis.call('HINCRBY', key, 'tokens', tokens)
  redis.call('HINCRBY', key, 'r' .. second, requests)
  redis.call('HINCRBY', key, 't' .. second, tokens)
  redis.call('EXPIRE', key, WINDOW_S + 2)
end

-- The ms at which a tenant is below its quotas per minute; 0 if it is.
local function within_rate_at(prefix, tenant, of)
  if not has_rate_quota(of) then return 0 end
  local most_requests, most_tokens = limit_of(of.requests_per_minute), limit_of(of.tokens_per_minute)
  local requests, tokens, second = used(prefix, tenant)
  if requests < most_requests and tokens < most_tokens then return 0 end
  local key = prefix .. 'usage:' .. tenant
  local last = math.floor(now_ms() / 1000)
  while second <= last and (requests >= most_requests or tokens >= most_tokens) do
    local num_requests, num_tokens = used_in(key, second)
    requests, tokens = requests - (num_requests or 0), tokens - num_tokens
    second = second + 1
  end
  return (second + WINDOW_S) * 1000
end

-- Counts of tenants and of the queue that a call changes for one request after the other; nil where each change is
-- written at once. Whoever reads them here writes them first.
local unwritten -- key -> field -> change

local function gather_counts() unwritten = {} end

local function add_to(key, field, change)
  if not unwritten then return redis.call('HINCRBY', key, field, change) end
  local of = unwritten[key] or {}
  unwritten[key] = of
  of[field] = (of[field] or 0) + change
end

-- Write what has gathered of a hash, or of all.
local function write_counts(key)
  for of, changes in pairs(unwritten or {}) do
    if not key or of == key then
      unwritten[of] = nil
      for field, change in pairs(changes) do redis.call('HINCRBY', of, field, string.format('%.0f', change)) end
    end
  end
end

local function num_started(prefix, tenant)
  local key = prefix .. 'tenant:' .. tenant
  write_counts(key)
  return count_of(redis.call('HGET', key, 'num_started'))
end

-- Tenants share the model while several have requests, and for a moment after: the last sequences of engines are kept then
-- for those that have less than an equal part of an engine. A full one would make them wait for somebody else's end first.
local SHARED_FOR_MS = 60000
local function is_shared(shared_at) return not marks.has_passed(shared_at and tonumber(shared_at), SHARED_FOR_MS) end

-- Whether a tenant has an equal part of an engine with so many sequences.
local function has_equal_part(prefix, tenant, num_seqs)
  local num_sharing = redis.call('SCARD', prefix .. 'active') + 1 -- with one who comes in a moment
  return num_started(prefix, tenant) * num_sharing >= num_seqs
end

-- The ms from which on a tenant may start a request; 0 if it may now, infinity if one of its own has to end first.
local function may_start_at(prefix, tenant)
  local of = tenant_policy(prefix, tenant)
  local most = limit_of(of.max_concurrent_requests)
  if most < math.huge and num_started(prefix, tenant) >= most then return math.huge end
  return within_rate_at(prefix, tenant, of)
end

-- What waits of a band, in the hash of a tenant or of the queue: requests and tokens, as they are written.
local function waiting_in(key, band)
  write_counts(key)
  local of = fields(key, 'depth:' .. band, 'tokens:' .. band)
  return of['depth:' .. band], of['tokens:' .. band]
end

-- What waits in lanes: requests and tokens of the bands' sums in a hash.
local function waiting(prefix, key)
  write_counts(key)
  local names, depth, tokens = {}, 0, 0
  for _, band in ipairs(queue_policy(prefix).bands) do
    names[#names + 1] = 'depth:' .. band
    names[#names + 1] = 'tokens:' .. band
  end
  local sums = redis.call('HMGET', key, unpack(names))
  for i = 1, #names, 2 do
    depth, tokens = depth + count_of(sums[i]), tokens + count_of(sums[i + 1])
  end
  return depth, tokens
end

-- The hash of a tenant goes when nothing is left of it.
local function forget_idle(prefix, tenant)
  local key = prefix .. 'tenant:' .. tenant
  if waiting(prefix, key) == 0 and num_started(prefix, tenant) == 0 then
    redis.call('DEL', key)
    redis.call('SREM', prefix .. 'active', tenant)
  end
end
