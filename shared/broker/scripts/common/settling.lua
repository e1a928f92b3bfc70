-- What follows from ends for all that requests share: charges, counts, rates, and where an ended request stood. Noted for
-- each end by close_request (life.lua), and written once for all ends of a call by settle_ends: an engine ends dozens in
-- a step, mostly of a few tenants.

local RATE_WINDOW_MS = 30000

-- The measured service rate, in "queue": requests, tokens (prompt and most output, as waiting ones are counted) and ms
-- in which any request was under way, fading by e every half minute; and the mean output of a request. served is a list
-- of {tokens, output tokens}, of requests that have ended now.
local function note_served(prefix, served)
  local key, now = prefix .. 'queue', now_ms()
  local rate = fields(key, 'rate_at', 'rate_ms', 'rate_requests', 'rate_tokens', 'mean_output')
  local elapsed = math.max(0, now - amount(rate.rate_at or now))
  local fade = math.exp(-elapsed / RATE_WINDOW_MS)
  local tokens, mean_output = amount(rate.rate_tokens) * fade, rate.mean_output
  for _, of in ipairs(served) do
    tokens = tokens + of[1]
    mean_output = mean_output and mean_output * 0.98 + of[2] * 0.02 or of[2]
  end
  redis.call('HSET', key, 'rate_at', now, 'rate_ms', amount(rate.rate_ms) * fade + elapsed,
    'rate_requests', amount(rate.rate_requests) * fade + #served, 'rate_tokens', tokens, 'mean_output', mean_output)
end

-- Count what was computed of a request against its tenant's quotas, instead of what was charged so far; returns the
-- difference, which its share is to be charged, too.
local function use_computed(prefix, tenant, computed, charged, charged_at)
  local extra = computed - charged
  if extra ~= 0 and has_rate_quota(tenant_policy(prefix, tenant)) then
    use(prefix, tenant, 0, extra, extra > 0 and now_ms() or charged_at)
  end
  return extra
end

-- So many requests less are under way; while none is, the time does not count as slow service.
local function stop_working(prefix, num_requests)
  local num_started = redis.call('HINCRBY', prefix .. 'queue', 'num_started', -num_requests)
  if num_started <= 0 then
    redis.call('HSET', prefix .. 'queue', 'idle_at', now_ms())
    -- What a damaged list has lost was not counted any more.
    if num_started < 0 then redis.call('HSET', prefix .. 'queue', 'num_started', 0) end
  end
end

-- Count anew what each tenant has under way: a damaged record named another tenant. What awaits input is in no list, so
-- while there is any, the tenants' counts are left for later. Returns how many there are in all but those.
local function recount_started(prefix)
  write_counts()
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

-- A request leaves the claims of its engine, whatever its record calls that.
local function leave_claims(prefix, engine, id)
  if engine and attempt('HDEL', prefix .. 'claims:' .. engine, id) == 1 then return end
  local holder = holder_of(prefix, id)
  if holder then redis.call('HDEL', prefix .. 'claims:' .. holder, id) end
end

-- What ends have left to settle: lists of what leaves a hash, set or sorted set, by its key, and keys to delete; of each
-- tenant how many had started, what it is to be charged in each band, and the least difference; what was served.
local ends -- nil while there are none

local function note_leaving(command, key, member)
  local of = ends.leaving[key] or {command}
  ends.leaving[key] = of
  of[#of + 1] = member
end

-- A request that was claimed has ended.
local function note_settled(prefix, now, prompt, most)
  local tenant, band, count = now.tenant, now.band, tonumber(now.count)
  local extra = use_computed(prefix, tenant, prompt + count, tonumber(now.charged), tonumber(now.charged_at))
  local of = ends.tenants[tenant]
  of.num_started, of.least_extra = of.num_started + 1, math.min(of.least_extra, extra)
  of.extra[band] = (of.extra[band] or 0) + extra
  ends.served[#ends.served + 1] = {prompt + most, count}
end

local function begin_settling(tenant)
  ends = ends or {leaving = {}, payloads = {}, tenants = {}, served = {}}
  ends.tenants[tenant] = ends.tenants[tenant] or {num_started = 0, extra = {}, least_extra = 0}
end

local function take_out_of_lists(prefix)
  for key, of in pairs(ends.leaving) do
    local num_left = attempt(of[1], key, unpack(of, 2))
    -- A damaged record names another engine than the one whose claim it is.
    if of[1] == 'HDEL' and num_left ~= #of - 1 then
      for i = 2, #of do leave_claims(prefix, nil, of[i]) end
    end
  end
  if #ends.payloads > 0 then redis.call('DEL', unpack(ends.payloads)) end
end

local function settle_started(prefix)
  local num_started, is_wrong = 0, false
  for tenant, of in pairs(ends.tenants) do
    for band, extra in pairs(of.extra) do
      if extra ~= 0 then charge(prefix, band, tenant, extra) end
    end
    if of.num_started > 0 then
      num_started = num_started + of.num_started
      if redis.call('HINCRBY', prefix .. 'tenant:' .. tenant, 'num_started', -of.num_started) < 0 then
        redis.call('HSET', prefix .. 'tenant:' .. tenant, 'num_started', 0)
        is_wrong = true
      end
    end
  end
  if is_wrong then recount_started(prefix) end
  if num_started > 0 then stop_working(prefix, num_started) end
end

-- Write what follows from the ends since the last time.
local function settle_ends(prefix)
  if not ends then return end
  write_counts()
  take_out_of_lists(prefix)
  settle_started(prefix)
  if #ends.served > 0 then note_served(prefix, ends.served) end
  local tenants = ends.tenants
  ends = nil -- what is unblocked may end others, which are settled by themselves
  for tenant, of in pairs(tenants) do
    local blocked = of.num_started > 0 and redis.call('ZSCORE', prefix .. 'blocked', tenant)
    if blocked and (blocked == 'inf' or of.least_extra < 0) then unblock(prefix, tenant) end
    forget_idle(prefix, tenant)
  end
end
