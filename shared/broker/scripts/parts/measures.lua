-- uses: life
-- The measurements that an estimate of waiting times needs (shared/queue/estimate.py).

-- Tenants of a band whose lanes are read; they represent all tenants if there are more.
local MAX_LANES = 32
-- Tenants over a quota whose requests are counted.
local MAX_BLOCKED = 100

-- Return lanes of a band that may be claimed from, as tenant, virtual time, requests, tokens, weight and arrival (ms)
-- of the first request. Of more than MAX_LANES, return those at equal distances in the order of their turns.
local function sample_lanes(prefix, band)
  local ready, lanes = prefix .. 'ready:' .. band, {}
  local number, depth, tokens, weight = redis.call('ZCARD', ready), 'depth:' .. band, 'tokens:' .. band, 'weight:' .. band
  local all = number <= MAX_LANES and redis.call('ZRANGE', ready, 0, -1, 'WITHSCORES')
  for i = 0, math.min(number, MAX_LANES) - 1 do
    local rank = math.floor(i * number / MAX_LANES)
    local turn = all and {all[2 * i + 1], all[2 * i + 2]} or redis.call('ZRANGE', ready, rank, rank, 'WITHSCORES')
    local tenant = turn[1]
    local sums = redis.call('HMGET', prefix .. 'tenant:' .. tenant, depth, tokens, weight)
    lanes[i + 1] = {tenant, tonumber(turn[2]), amount(sums[1] or nil), amount(sums[2] or nil),
      amount(sums[3] or tenant_policy(prefix, tenant).weight),
      amount(redis.call('ZSCORE', prefix .. 'heads:' .. band, tenant) or nil)}
  end
  return lanes
end

-- Return the ms at which a tenant's quotas are checked again: 0 if it is within them, -1 if a request must end first.
local function blocked_until(prefix, tenant)
  local blocked = redis.call('ZSCORE', prefix .. 'blocked', tenant)
  return blocked == 'inf' and -1 or tonumber(blocked or 0)
end

-- Return a tenant's weight, requests and tokens per minute, and max concurrent requests, each 0 without a limit.
local function limits_of(prefix, tenant)
  local policy = tenant_policy(prefix, tenant)
  local function number(limit) return limit == cjson.null and 0 or limit end
  return {policy.weight, number(policy.requests_per_minute), number(policy.tokens_per_minute),
    number(policy.max_concurrent_requests)}
end

-- Return the waiting requests and tokens of tenants over a quota, by band.
local function blocked_by_band(prefix)
  local sums = {}
  for _, tenant in ipairs(redis.call('ZRANGE', prefix .. 'blocked', 0, MAX_BLOCKED - 1)) do
    for _, band in ipairs(queue_policy(prefix).bands) do
      local depth, tokens = waiting_in(prefix .. 'tenant:' .. tenant, band)
      local sum = sums[band] or {0, 0}
      sums[band] = {sum[1] + amount(depth), sum[2] + amount(tokens)}
    end
  end
  return sums
end

-- Return the measurements. only is the band whose lanes are read, nil for all. The result is a list:
--   the time (ms); ms since when the queue is paused, 0 if it is not; ageing (ms, -1 without); strictness;
--   requests that were claimed and have not ended, and those of them that wait for another engine;
--   ms until which count_held_time has counted, ms for which engines held requests, and the part of claims that ended;
--   what live engines can hold: their number, sequences, held sequences, tokens, held tokens;
--   for each band: name, requests, tokens, those two of tenants over a quota, tenants, arrival (ms) of the oldest request,
--   entered:BAND, rate:BAND, and its lanes.
local function measures(prefix, only)
  local queue, bands, blocked = prefix .. 'queue', {}, blocked_by_band(prefix)
  local sums = fields(queue, 'paused', 'num_started', 'held_at', 'rate_at', 'rate_held_ms', 'rate_ended_ms')
  for i, band in ipairs(queue_policy(prefix).bands) do
    local depth, tokens = waiting_in(queue, band)
    local head = redis.call('ZRANGE', prefix .. 'heads:' .. band, 0, 0, 'WITHSCORES')[2]
    local sum, over_quota = fields(queue, 'entered:' .. band, 'rate:' .. band), blocked[band] or {0, 0}
    bands[i] = {band, count_of(depth), count_of(tokens), over_quota[1], over_quota[2],
      redis.call('ZCARD', prefix .. 'ready:' .. band),
      tonumber(head or 0), count_of(sum['entered:' .. band]), sum['rate:' .. band] or '',
      (only or band) == band and sample_lanes(prefix, band) or {}}
  end
  local rooms = capacity_of_others(prefix, '') or {num = 0, seqs = 0, held_seqs = 0, tokens = 0, held_tokens = 0}
  local ageing_s = limit_of(queue_policy(prefix).ageing_s)
  return {now_ms(), count_of(sums.paused), ageing_s < math.huge and 1000 * ageing_s or -1, queue_policy(prefix).strictness,
    count_of(sums.num_started), redis.call('LLEN', prefix .. 'returned') + redis.call('LLEN', prefix .. 'suspects'),
    math.max(amount(sums.held_at), amount(sums.rate_at)), amount(sums.rate_held_ms), amount(sums.rate_ended_ms),
    {rooms.num, rooms.seqs, rooms.held_seqs, rooms.tokens, rooms.held_tokens}, bands}
end
