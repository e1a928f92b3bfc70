-- uses: damage, ledger
-- Effects of ends on shared state: charges, counts, rates, and the lists that an ended request is in. close_request
-- (life.lua) collects them for each end, and settle_ends writes them once for all ends of a call, because an engine
-- ends dozens of requests in a step, mostly of a few tenants.

-- Measurements of service. One table, because a script has at most 200 local names.
local service = {}
do
  local RATE_WINDOW_MS, WORK_WINDOW_MS = 30000, 300000

  -- Measurements of a band, in rate:BAND of "queue" as numbers separated by spaces: the ms at which they were written;
  -- the ms that the next ones cover, ended requests, their tokens (prompt and max output), and arrived requests, all
  -- decaying by e every half minute; the same four, computed tokens, and ms for which engines held the requests,
  -- decaying by e every five minutes; and entered:BAND as it was. Idle time counts too, so rates decay to zero.
  -- shared/broker/measured.py reads them.
  local NUM_SUMS, NUM_FAST = 10, 4
  local RATE_TEXT = '%.0f' .. string.rep(' %.6g', NUM_SUMS) .. ' %.0f'
  local function measure_band(prefix, band, served)
    local key, time_ms, rate = prefix .. 'queue', now_ms(), {}
    local before = fields(key, 'rate:' .. band, 'entered:' .. band)
    for number in string.gmatch(before['rate:' .. band] or '', '%S+') do rate[#rate + 1] = tonumber(number) end
    local entered = count_of(before['entered:' .. band])
    if #rate ~= NUM_SUMS + 2 then rate = {time_ms - served[1].held_ms, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, entered} end
    local elapsed = math.max(0, time_ms - rate[1])
    local tokens, computed, held_ms, arrived = 0, 0, 0, math.max(0, entered - rate[NUM_SUMS + 2])
    for _, request in ipairs(served) do
      tokens, computed, held_ms = tokens + request.tokens, computed + request.computed, held_ms + request.held_ms
    end
    local fast, slow = math.exp(-elapsed / RATE_WINDOW_MS), math.exp(-elapsed / WORK_WINDOW_MS)
    local changes = {elapsed, #served, tokens, arrived, elapsed, #served, tokens, arrived, computed, held_ms}
    for i, change in ipairs(changes) do
      rate[i + 1] = rate[i + 1] * (i <= NUM_FAST and fast or slow) + change
    end
    rate[1], rate[NUM_SUMS + 2] = time_ms, entered
    redis.call('HSET', key, 'rate:' .. band, string.format(RATE_TEXT, unpack(rate)))
  end

  -- Update the service rate, in "queue": requests, tokens (prompt and max output, as for waiting requests) and ms in
  -- which any request was running, decaying by e every half minute; and the mean output of a request. served has a
  -- table for each request that has ended now: band, tokens, output and computed tokens, ms for which engines held it,
  -- and ms since its last claim. Call count_held_time first, because the number of running requests has changed.
  function service.count_served(prefix, served)
    local key, time_ms, by_band = prefix .. 'queue', now_ms(), {}
    local rate = fields(key, 'rate_at', 'rate_ms', 'rate_requests', 'rate_tokens', 'mean_output', 'rate_ended_ms', 'budgets')
    marks.budgets = rate.budgets or false
    local elapsed = math.max(0, time_ms - amount(rate.rate_at or time_ms))
    local fade = math.exp(-elapsed / RATE_WINDOW_MS)
    local tokens, mean_output, ended_ms = amount(rate.rate_tokens) * fade, rate.mean_output, amount(rate.rate_ended_ms)
    for _, request in ipairs(served) do
      tokens, ended_ms = tokens + request.tokens, ended_ms + request.claim_ms
      mean_output = mean_output and mean_output * 0.98 + request.output * 0.02 or request.output
      by_band[request.band] = by_band[request.band] or {}
      table.insert(by_band[request.band], request)
    end
    redis.call('HSET', key, 'rate_at', time_ms, 'rate_ms', amount(rate.rate_ms) * fade + elapsed,
      'rate_requests', amount(rate.rate_requests) * fade + #served, 'rate_tokens', tokens, 'mean_output', mean_output,
      'rate_ended_ms', ended_ms)
    for band, requests in pairs(by_band) do
      if has_band(prefix, band) then measure_band(prefix, band, requests) end -- it may have been removed meanwhile
    end
  end

  -- Count the time since the last call for the requests that engines have held since then. Call it before their number
  -- changes, so that no request counts for the time before its claim. Fields of "queue", decaying by e every five
  -- minutes: rate_held_ms is the time for which engines have held requests; rate_ended_ms is the part of claims that
  -- have ended, and ended_ms is added to it. held_at is the ms of the last call.
  function service.count_held_time(prefix, ended_ms)
    local key, time_ms = prefix .. 'queue', now_ms()
    local sums = fields(key, 'held_at', 'rate_at', 'rate_held_ms', 'rate_ended_ms', 'num_started')
    -- The release before this field counted until rate_at, and may still do so in other processes.
    local since = math.max(amount(sums.held_at), amount(sums.rate_at))
    local elapsed = since > 0 and math.max(0, time_ms - since) or 0
    if sums.held_at and elapsed == 0 and not ended_ms then return end
    local num_waiting = (attempt('LLEN', prefix .. 'returned') or 0) + (attempt('LLEN', prefix .. 'suspects') or 0)
    local num_held, slow = math.max(0, amount(sums.num_started) - num_waiting), math.exp(-elapsed / WORK_WINDOW_MS)
    redis.call('HSET', key, 'held_at', time_ms, 'rate_held_ms', amount(sums.rate_held_ms) * slow + elapsed * num_held,
      'rate_ended_ms', amount(sums.rate_ended_ms) * slow + (ended_ms or 0))
  end

  -- Return the ms since the last claim of a request, 0 if no engine holds it, and the ms of all its claims. request has
  -- its fields engine, held_at, held_ms and charged_at. Claims by the release before held_at count from charged_at.
  function service.held_ms(request)
    local since = request.engine and (whole(request.held_at) or whole(request.charged_at)) or now_ms()
    local claim_ms = math.max(0, now_ms() - since)
    return claim_ms, (whole(request.held_ms) or 0) + claim_ms
  end

  -- Count a claim that ends before its request does. Call it while the engine still holds the request.
  function service.count_released(prefix, key)
    local claim_ms, held_ms = service.held_ms(fields(key, 'engine', 'held_at', 'held_ms', 'charged_at'))
    service.count_held_time(prefix, claim_ms)
    redis.call('HSET', key, 'held_ms', held_ms)
  end
end

-- Count the computed tokens of a request against its tenant's quotas, instead of the tokens charged so far. Returns the
-- difference, which the caller charges to the tenant's share.
local function use_computed(prefix, tenant, computed, charged, charged_at)
  local extra = computed - charged
  if extra ~= 0 and has_rate_quota(tenant_policy(prefix, tenant)) then
    use(prefix, tenant, 0, extra, extra > 0 and now_ms() or charged_at)
  end
  return extra
end

-- Decrease the number of running requests. While there are none, time does not count as slow service.
local function stop_working(prefix, num_requests)
  service.count_held_time(prefix)
  local num_started = redis.call('HINCRBY', prefix .. 'queue', 'num_started', -num_requests)
  if num_started <= 0 then
    redis.call('HSET', prefix .. 'queue', 'idle_at', now_ms())
    -- A damaged list had lost requests, which were not counted any more.
    if num_started < 0 then redis.call('HSET', prefix .. 'queue', 'num_started', 0) end
  end
end

-- Count the running requests of each tenant again, because a damaged record named another tenant. Requests that await
-- input are in no list, so while there are any, the counts of tenants are not changed. Returns the number of all but
-- those.
local function recount_started(prefix)
  write_counts()
  local counts, num_started = {}, 0
  local function count(ids)
    for _, id in ipairs(ids) do
      local request = fields_of(prefix .. 'request:' .. id, 'state', 'tenant')
      local tenant = request.tenant or LOST_TENANT
      if not ENDED[request.state] then counts[tenant], num_started = (counts[tenant] or 0) + 1, num_started + 1 end
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

-- Remove a request from the claims of its engine, even if its record names another engine.
local function leave_claims(prefix, engine, id)
  if engine and attempt('HDEL', prefix .. 'claims:' .. engine, id) == 1 then return end
  local holder = holder_of(prefix, id)
  if holder then redis.call('HDEL', prefix .. 'claims:' .. holder, id) end
end

-- Effects that are not written yet: members to remove from a hash, set or sorted set, by key; keys to delete; for each
-- tenant the number of started requests, the charge in each band, and the least difference; and the served requests.
local ends -- nil without any

local function remove_later(command, key, member)
  local removal = ends.removals[key] or {command}
  ends.removals[key] = removal
  removal[#removal + 1] = member
end

-- Collect the effects of the end of a request that was claimed.
local function settle_claimed(prefix, request, prompt, most)
  local tenant, band, count = request.tenant, request.band, tonumber(request.count)
  local extra = use_computed(prefix, tenant, prompt + count, tonumber(request.charged), tonumber(request.charged_at))
  local effects = ends.tenants[tenant]
  effects.num_started, effects.least_extra = effects.num_started + 1, math.min(effects.least_extra, extra)
  effects.extra[band] = (effects.extra[band] or 0) + extra
  local claim_ms, held_ms = service.held_ms(request)
  ends.served[#ends.served + 1] = {band = band, tokens = prompt + most, output = count, computed = prompt + count,
    claim_ms = claim_ms, held_ms = held_ms}
end

local function begin_settling(tenant)
  ends = ends or {removals = {}, payloads = {}, tenants = {}, served = {}}
  ends.tenants[tenant] = ends.tenants[tenant] or {num_started = 0, extra = {}, least_extra = 0}
end

local function remove_from_lists(prefix)
  for key, removal in pairs(ends.removals) do
    local num_removed = attempt(removal[1], key, unpack(removal, 2))
    -- A damaged record may name another engine than the one with the claim.
    if removal[1] == 'HDEL' and num_removed ~= #removal - 1 then
      for i = 2, #removal do leave_claims(prefix, nil, removal[i]) end
    end
  end
  if #ends.payloads > 0 then redis.call('DEL', unpack(ends.payloads)) end
end

local function settle_started(prefix)
  local num_started, is_wrong = 0, false
  for tenant, effects in pairs(ends.tenants) do
    for band, extra in pairs(effects.extra) do
      if extra ~= 0 then charge(prefix, band, tenant, extra) end
    end
    if effects.num_started > 0 then
      num_started = num_started + effects.num_started
      if redis.call('HINCRBY', prefix .. 'tenant:' .. tenant, 'num_started', -effects.num_started) < 0 then
        redis.call('HSET', prefix .. 'tenant:' .. tenant, 'num_started', 0)
        is_wrong = true
      end
    end
  end
  if is_wrong then recount_started(prefix) end
  if num_started > 0 then stop_working(prefix, num_started) end
end

-- Write the collected effects.
local function settle_ends(prefix)
  open_ledger().write(prefix)
  if not ends then return open_ledger().spend(prefix) end
  write_counts()
  remove_from_lists(prefix)
  settle_started(prefix)
  if #ends.served > 0 then service.count_served(prefix, ends.served) end
  open_ledger().spend(prefix)
  local tenants = ends.tenants
  ends = nil -- unblocking may end other requests, which are settled separately
  for tenant, effects in pairs(tenants) do
    local blocked = effects.num_started > 0 and redis.call('ZSCORE', prefix .. 'blocked', tenant)
    if blocked and (blocked == 'inf' or effects.least_extra < 0) then unblock(prefix, tenant) end
    forget_idle(prefix, tenant)
  end
end
