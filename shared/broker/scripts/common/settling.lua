-- What follows from ends for all that requests share: charges, counts, rates, and where an ended request stood. Noted for
-- each end by close_request (life.lua), and written once for all ends of a call by settle_ends: an engine ends dozens in
-- a step, mostly of a few tenants.

-- The measures of service. They are in one table, because a script has at most 200 local names.
local service = {}
do
  local RATE_WINDOW_MS, WORK_WINDOW_MS = 30000, 300000

  -- Measures of a band, in rate:BAND of "queue" as numbers with blanks between them: the ms at which they were written;
  -- the ms that the next ones are of, requests that ended, their tokens (prompt and most output), and requests that came,
  -- all fading by e every half minute; the same four, tokens that were computed, and ms for which engines held them,
  -- fading by e every five minutes; and entered:BAND as it was. Time in which nothing happens counts too, so rates fall
  -- to zero. shared/broker/measured.py reads them.
  local NUM_SUMS, NUM_FAST = 10, 4
  local RATE_TEXT = '%.0f' .. string.rep(' %.6g', NUM_SUMS) .. ' %.0f'
  local function note_band_served(prefix, band, served)
    local key, now, rate = prefix .. 'queue', now_ms(), {}
    local noted = fields(key, 'rate:' .. band, 'entered:' .. band)
    for number in string.gmatch(noted['rate:' .. band] or '', '%S+') do rate[#rate + 1] = tonumber(number) end
    local entered = count_of(noted['entered:' .. band])
    if #rate ~= NUM_SUMS + 2 then rate = {now - served[1].held_ms, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, entered} end
    local elapsed = math.max(0, now - rate[1])
    local tokens, computed, held_ms, came = 0, 0, 0, math.max(0, entered - rate[NUM_SUMS + 2])
    for _, of in ipairs(served) do
      tokens, computed, held_ms = tokens + of.tokens, computed + of.computed, held_ms + of.held_ms
    end
    local fast, slow = math.exp(-elapsed / RATE_WINDOW_MS), math.exp(-elapsed / WORK_WINDOW_MS)
    for i, more in ipairs({elapsed, #served, tokens, came, elapsed, #served, tokens, came, computed, held_ms}) do
      rate[i + 1] = rate[i + 1] * (i <= NUM_FAST and fast or slow) + more
    end
    rate[1], rate[NUM_SUMS + 2] = now, entered
    redis.call('HSET', key, 'rate:' .. band, string.format(RATE_TEXT, unpack(rate)))
  end

  -- The measured service rate, in "queue": requests, tokens (prompt and most output, as waiting ones are counted) and ms
  -- in which any request was under way, fading by e every half minute; and the mean output of a request. served has
  -- tables of the requests that have ended now: band, tokens, output and computed tokens, ms for which engines held
  -- them, and ms since the last claim. note_under_way has run before, because their number has changed.
  function service.note_served(prefix, served)
    local key, now, by_band = prefix .. 'queue', now_ms(), {}
    local rate = fields(key, 'rate_at', 'rate_ms', 'rate_requests', 'rate_tokens', 'mean_output', 'rate_ended_ms')
    local elapsed = math.max(0, now - amount(rate.rate_at or now))
    local fade = math.exp(-elapsed / RATE_WINDOW_MS)
    local tokens, mean_output, ended_ms = amount(rate.rate_tokens) * fade, rate.mean_output, amount(rate.rate_ended_ms)
    for _, of in ipairs(served) do
      tokens, ended_ms = tokens + of.tokens, ended_ms + of.claim_ms
      mean_output = mean_output and mean_output * 0.98 + of.output * 0.02 or of.output
      by_band[of.band] = by_band[of.band] or {}
      table.insert(by_band[of.band], of)
    end
    redis.call('HSET', key, 'rate_at', now, 'rate_ms', amount(rate.rate_ms) * fade + elapsed,
      'rate_requests', amount(rate.rate_requests) * fade + #served, 'rate_tokens', tokens, 'mean_output', mean_output,
      'rate_ended_ms', ended_ms)
    for band, of in pairs(by_band) do
      if has_band(prefix, band) then note_band_served(prefix, band, of) end -- it may have been removed meanwhile
    end
  end

  -- Count the time since the last call for the requests that engines have held since then. Call it before their number
  -- changes, so that no request counts for the time before its claim. Fields of "queue", fading by e every five minutes:
  -- rate_held_ms is the time for which engines have held requests, and rate_ended_ms the part of claims that have ended,
  -- to which ended_ms is added. held_at is the ms of the last call.
  function service.note_under_way(prefix, ended_ms)
    local key, now = prefix .. 'queue', now_ms()
    local sums = fields(key, 'held_at', 'rate_at', 'rate_held_ms', 'rate_ended_ms', 'num_started')
    -- The release before this field counted until rate_at, and may still do so in other processes.
    local since = math.max(amount(sums.held_at), amount(sums.rate_at))
    local elapsed = since > 0 and math.max(0, now - since) or 0
    if sums.held_at and elapsed == 0 and not ended_ms then return end
    local num_waiting = (attempt('LLEN', prefix .. 'returned') or 0) + (attempt('LLEN', prefix .. 'suspects') or 0)
    local num_held, slow = math.max(0, amount(sums.num_started) - num_waiting), math.exp(-elapsed / WORK_WINDOW_MS)
    redis.call('HSET', key, 'held_at', now, 'rate_held_ms', amount(sums.rate_held_ms) * slow + elapsed * num_held,
      'rate_ended_ms', amount(sums.rate_ended_ms) * slow + (ended_ms or 0))
  end

  -- Return the ms since the last claim of a request, 0 if no engine holds it, and those of all its claims. now has its
  -- fields engine, held_at, held_ms and charged_at. Claims by the release before held_at count from charged_at.
  function service.held_ms(now)
    local since = now.engine and (whole(now.held_at) or whole(now.charged_at)) or now_ms()
    local claim_ms = math.max(0, now_ms() - since)
    return claim_ms, (whole(now.held_ms) or 0) + claim_ms
  end

  -- Count a claim that ends before its request does. Call it while the engine still holds the request.
  function service.note_released(prefix, key)
    local claim_ms, held_ms = service.held_ms(fields(key, 'engine', 'held_at', 'held_ms', 'charged_at'))
    service.note_under_way(prefix, claim_ms)
    redis.call('HSET', key, 'held_ms', held_ms)
  end
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
  service.note_under_way(prefix)
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
  local claim_ms, held_ms = service.held_ms(now)
  ends.served[#ends.served + 1] = {band = band, tokens = prompt + most, output = count, computed = prompt + count,
    claim_ms = claim_ms, held_ms = held_ms}
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
  if #ends.served > 0 then service.note_served(prefix, ends.served) end
  local tenants = ends.tenants
  ends = nil -- what is unblocked may end others, which are settled by themselves
  for tenant, of in pairs(tenants) do
    local blocked = of.num_started > 0 and redis.call('ZSCORE', prefix .. 'blocked', tenant)
    if blocked and (blocked == 'inf' or of.least_extra < 0) then unblock(prefix, tenant) end
    forget_idle(prefix, tenant)
  end
end
