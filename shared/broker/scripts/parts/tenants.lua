-- uses: lib
-- Policies, and the usage of each tenant within the last minute.
--
-- A tenant is a hash, which is deleted (and the tenant removed from the set "active") when it has no waiting or running
-- request. depth:BAND and tokens:BAND are the sums of its lanes, entered:BAND counts the requests that ever entered,
-- weight:BAND is the weight of its lane while the lane is in ready:BAND, and num_started counts the requests that were
-- claimed and have not ended. The hash "queue" has the sums of depth:BAND, tokens:BAND and weight:BAND of all tenants.
-- Usage is stored per second, so that the minute is a sliding window: "r<second>" requests and "t<second>" tokens, with
-- their sums, from second "from" on. The usage of the last 60 s is never more than the sums, which cover 60 to 61 s.
-- "last" is the last second with usage: if it is in the future, the clock has gone back, and everything is dropped.

local WINDOW_S = 60

-- Return a policy whose absent fields, which an older version did not write, have their defaults. part names the part
-- of the queue's policy, nil for all of it.
local function with_defaults(stored, part)
  return setmetatable(stored, {__index = function(_, name)
    local defaults = cjson.decode(DEFAULT_POLICY)
    stored[name] = (part and defaults[part] or defaults)[name] -- stored, because decoding is slow
    return rawget(stored, name)
  end})
end

local policy
local function queue_policy(prefix)
  if not policy then
    local stored = with_defaults(cjson.decode(redis.call('GET', prefix .. 'policy') or DEFAULT_POLICY))
    for _, band in ipairs(stored.bands) do
      if band == stored.default_band then policy = stored end
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
  local stored = tenant_policies[tenant]
  if not stored then
    local own = redis.call('HGET', prefix .. 'tenants', tenant)
    stored = with_defaults(own and cjson.decode(own) or queue_policy(prefix).tenant, 'tenant')
    if type(stored.weight) ~= 'number' then error('the policy of a tenant has no weight') end
    tenant_policies[tenant] = stored
  end
  return stored
end

-- Return a limit as a number: infinity if it is not set, which is null in the policy's JSON.
local function limit_of(value)
  return value == cjson.null and math.huge or value
end

local function has_rate_quota(policy)
  return limit_of(policy.requests_per_minute) < math.huge or limit_of(policy.tokens_per_minute) < math.huge
end

-- Return requests and tokens of one second; nil and 0 if there were none.
local function used_in(key, second)
  local usage = fields(key, 'r' .. second, 't' .. second)
  return tonumber(usage['r' .. second]), tonumber(usage['t' .. second] or 0)
end

-- Drop usage that has left the window. Returns requests and tokens within it, and its first second.
local function used(prefix, tenant)
  local key = prefix .. 'usage:' .. tenant
  local sums = fields(key, 'from', 'requests', 'tokens', 'last')
  if not sums.from then return 0, 0, nil end
  local from, requests, tokens = whole(sums.from), whole(sums.requests), whole(sums.tokens)
  local first = math.floor(now_ms() / 1000) - WINDOW_S
  local last = whole(sums.last) or from
  if not (from and requests and tokens) or from < first - 2 * WINDOW_S or last > first + WINDOW_S then
    redis.call('DEL', key) -- written by something other than the scripts, or by another clock
    return 0, 0, nil
  end
  if from >= first then return requests, tokens, from end
  -- The key expires a little after the window, so the loop is short.
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

-- Count requests and tokens as used at ms "at". Usage before the window is ignored.
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

-- Return the ms at which a tenant is below its quotas per minute; 0 if it is now.
local function within_rate_at(prefix, tenant, policy)
  if not has_rate_quota(policy) then return 0 end
  local most_requests, most_tokens = limit_of(policy.requests_per_minute), limit_of(policy.tokens_per_minute)
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

-- Changes of the counts of tenants and of the queue that a call collects over many requests; nil to write each change
-- immediately. Code that reads such counts calls write_counts first.
local unwritten -- key -> field -> change

local function gather_counts() unwritten = {} end

local function add_to(key, field, change)
  if not unwritten then return redis.call('HINCRBY', key, field, change) end
  local changes = unwritten[key] or {}
  unwritten[key] = changes
  changes[field] = (changes[field] or 0) + change
end

-- Write the collected changes of a hash, or of all.
local function write_counts(key)
  for changed_key, changes in pairs(unwritten or {}) do
    if not key or changed_key == key then
      unwritten[changed_key] = nil
      for field, change in pairs(changes) do redis.call('HINCRBY', changed_key, field, string.format('%.0f', change)) end
    end
  end
end

local function num_started(prefix, tenant)
  local key = prefix .. 'tenant:' .. tenant
  write_counts(key)
  return count_of(redis.call('HGET', key, 'num_started'))
end

-- Tenants share the model while several have requests, and for SHARED_FOR_MS after. Then the last sequences of engines
-- are reserved for tenants with less than an equal part of an engine; on a full engine these would wait until a request
-- of another tenant ends.
local SHARED_FOR_MS = 60000
local function is_shared(shared_at) return not marks.has_passed(shared_at and tonumber(shared_at), SHARED_FOR_MS) end

-- Whether a tenant runs an equal part of the requests of an engine with num_seqs sequences.
local function has_equal_part(prefix, tenant, num_seqs)
  local num_sharing = redis.call('SCARD', prefix .. 'active') + 1 -- including a tenant that arrives next
  return num_started(prefix, tenant) * num_sharing >= num_seqs
end

-- Return the ms from which a tenant may start a request; 0 if it may now, infinity if one of its requests must end
-- first.
local function may_start_at(prefix, tenant)
  local policy = tenant_policy(prefix, tenant)
  local most = limit_of(policy.max_concurrent_requests)
  if most < math.huge and num_started(prefix, tenant) >= most then return math.huge end
  return within_rate_at(prefix, tenant, policy)
end

-- Return requests and tokens that wait in a band, in the hash of a tenant or of the queue, as strings.
local function waiting_in(key, band)
  write_counts(key)
  local sums = fields(key, 'depth:' .. band, 'tokens:' .. band)
  return sums['depth:' .. band], sums['tokens:' .. band]
end

-- Return requests and tokens that wait in all lanes of a hash, as in waiting_in.
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

-- Delete the hash of a tenant without requests.
local function forget_idle(prefix, tenant)
  local key = prefix .. 'tenant:' .. tenant
  if waiting(prefix, key) == 0 and num_started(prefix, tenant) == 0 then
    redis.call('DEL', key)
    redis.call('SREM', prefix .. 'active', tenant)
  end
end
