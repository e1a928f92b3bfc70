-- What an estimate of waiting times is made of (shared/queue/estimate.py). Put in front of what returns it.

-- Tenants of a band whose lanes are looked at; they stand for all where there are more.
local MAX_LANES = 32
-- Tenants over a quota whose requests are counted.
local MAX_BLOCKED = 100

-- Lanes of a band that may be claimed from, as tenant, virtual time, requests, tokens, weight and arrival (ms) of the
-- first; of many, those at equal distances in the order of their turns.
local function sample_lanes(prefix, band)
  local ready, lanes = prefix .. 'ready:' .. band, {}
  local number, depth, tokens, weight = redis.call('ZCARD', ready), 'depth:' .. band, 'tokens:' .. band, 'weight:' .. band
  local all = number <= MAX_LANES and redis.call('ZRANGE', ready, 0, -1, 'WITHSCORES')
  for i = 0, math.min(number, MAX_LANES) - 1 do
    local rank = math.floor(i * number / MAX_LANES)
    local turn = all and {all[2 * i + 1], all[2 * i + 2]} or redis.call('ZRANGE', ready, rank, rank, 'WITHSCORES')
    local tenant = turn[1]
    local of = redis.call('HMGET', prefix .. 'tenant:' .. tenant, depth, tokens, weight)
    lanes[i + 1] = {tenant, tonumber(turn[2]), amount(of[1] or nil), amount(of[2] or nil),
      amount(of[3] or tenant_policy(prefix, tenant).weight), amount(redis.call('ZSCORE', prefix .. 'heads:' .. band, tenant) or nil)}
  end
  return lanes
end

-- ms at which the quotas of a tenant are looked at again: 0 if it is within them, -1 if one of its requests has to end.
local function blocked_until(prefix, tenant)
  local blocked = redis.call('ZSCORE', prefix .. 'blocked', tenant)
  return blocked == 'inf' and -1 or tonumber(blocked or 0)
end

-- Weight of a tenant, requests and tokens a minute, and most concurrent requests, each 0 for no limit.
local function limits_of(prefix, tenant)
  local of = tenant_policy(prefix, tenant)
  local function number(limit) return limit == cjson.null and 0 or limit end
  return {of.weight, number(of.requests_per_minute), number(of.tokens_per_minute), number(of.max_concurrent_requests)}
end

-- Requests and tokens that wait of tenants over a quota, by band.
local function blocked_by_band(prefix)
  local sums = {}
  for _, tenant in ipairs(redis.call('ZRANGE', prefix .. 'blocked', 0, MAX_BLOCKED - 1)) do
    for _, band in ipairs(queue_policy(prefix).bands) do
      local depth, tokens = waiting_in(prefix .. 'tenant:' .. tenant, band)
      local of = sums[band] or {0, 0}
      sums[band] = {of[1] + amount(depth), of[2] + amount(tokens)}
    end
  end
  return sums
end

-- only is the band whose lanes are looked at, nil for all. Returns ms of now, ms since when the queue is paused (0 if not),
-- ageing (ms, -1 without) and strictness, requests that were claimed and have not ended, those of them that wait for
-- another engine; ms until which note_under_way has counted, ms for which engines held requests, and those of claims that
-- ended; what live engines
-- can hold: how many they are, sequences, those held, tokens, those held; and for each band: name, requests, tokens, and
-- those of tenants over a quota, tenants, arrival (ms) of the oldest, entered:BAND, rate:BAND, and its lanes.
local function measures(prefix, only)
  local queue, bands, blocked = prefix .. 'queue', {}, blocked_by_band(prefix)
  local sums = fields(queue, 'paused', 'num_started', 'held_at', 'rate_at', 'rate_held_ms', 'rate_ended_ms')
  for i, band in ipairs(queue_policy(prefix).bands) do
    local depth, tokens = waiting_in(queue, band)
    local head = redis.call('ZRANGE', prefix .. 'heads:' .. band, 0, 0, 'WITHSCORES')[2]
    local of, out = fields(queue, 'entered:' .. band, 'rate:' .. band), blocked[band] or {0, 0}
    bands[i] = {band, count_of(depth), count_of(tokens), out[1], out[2], redis.call('ZCARD', prefix .. 'ready:' .. band),
      tonumber(head or 0), count_of(of['entered:' .. band]), of['rate:' .. band] or '',
      (only or band) == band and sample_lanes(prefix, band) or {}}
  end
  local rooms = other_rooms(prefix, '') or {num = 0, seqs = 0, held_seqs = 0, tokens = 0, held_tokens = 0}
  local ageing_s = limit_of(queue_policy(prefix).ageing_s)
  return {now_ms(), count_of(sums.paused), ageing_s < math.huge and 1000 * ageing_s or -1, queue_policy(prefix).strictness,
    count_of(sums.num_started), redis.call('LLEN', prefix .. 'returned') + redis.call('LLEN', prefix .. 'suspects'),
    math.max(amount(sums.held_at), amount(sums.rate_at)), amount(sums.rate_held_ms), amount(sums.rate_ended_ms),
    {rooms.num, rooms.seqs, rooms.held_seqs, rooms.tokens, rooms.held_tokens}, bands}
end
