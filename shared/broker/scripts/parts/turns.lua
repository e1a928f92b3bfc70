-- uses: life
-- Which lane has its turn: among bands, among the tenants of a band, and among engines.

-- Return the tenant that has its turn in a band, and its virtual time. skipped is a set of lanes, and their number.
local function next_tenant(prefix, band, skipped)
  if band_state.empty_bands[band] then return nil end
  for i = 0, skipped.num do
    local tenant, time = unpack(redis.call('ZRANGE', prefix .. 'ready:' .. band, i, i, 'WITHSCORES'))
    if not tenant then
      band_state.empty_bands[band] = i == 0 or nil
      return nil
    end
    if not skipped[lane_key(prefix, band, tenant)] then return tenant, tonumber(time) end
  end
end

-- Whether a request of a lower band has waited so long that it counts as one of this band.
local function has_aged_below(prefix, level, tenants)
  local bands, ageing_ms = queue_policy(prefix).bands, limit_of(queue_policy(prefix).ageing_s) * 1000
  for lower = level + 1, #bands do
    if tenants[lower] then note_heads(prefix) end
    local head = tenants[lower] and redis.call('ZRANGE', prefix .. 'heads:' .. bands[lower], 0, 0, 'WITHSCORES')[2]
    if head and now_ms() - tonumber(head) >= ageing_ms * (lower - level) then return true end
  end
  return false
end

-- Return the next turn: the level of its band; the tenant and its virtual time; gave_way, the bands that gave way to
-- it; and is_against_aged, whether its band is served before older requests of lower bands. The highest band with
-- requests comes first. Once requests of lower bands have aged, those bands get the share that the policy's strictness
-- leaves of each token. The share is saved as the "credit" of the higher band.
local function next_turn(prefix, skipped)
  local bands, tenants, times, gave_way = queue_policy(prefix).bands, {}, {}, {}
  for level, band in ipairs(bands) do
    local tenant, time = next_tenant(prefix, band, skipped)
    tenants[level], times[level] = tenant or false, time
  end
  for level, band in ipairs(bands) do
    if tenants[level] then
      local turn = {level = level, tenant = tenants[level], time = times[level], gave_way = gave_way}
      if not has_aged_below(prefix, level, tenants) then return turn end
      if amount(redis.call('HGET', prefix .. 'queue', 'credit:' .. band)) <= 0 then
        turn.is_against_aged = true
        return turn
      end
      gave_way[#gave_way + 1] = band
    end
  end
end

-- Charge a turn's tokens to the credits of the bands.
local function settle_turn(prefix, turn, tokens)
  local queue, bands, strictness = prefix .. 'queue', queue_policy(prefix).bands, queue_policy(prefix).strictness
  for _, band in ipairs(turn.gave_way) do redis.call('HINCRBYFLOAT', queue, 'credit:' .. band, -tokens) end
  if turn.is_against_aged then
    redis.call('HINCRBYFLOAT', queue, 'credit:' .. bands[turn.level], tokens * (1 - strictness) / strictness)
  end
end

-- Return the capacity and load of all engines and the number of waiting requests. capacity is this engine's. Returns
-- nil if there is no other engine.
local function capacity_of_all(prefix, engine, capacity)
  local sums = capacity_of_others(prefix, engine)
  if not sums then return nil end
  for field, number in pairs(capacity) do sums[field] = sums[field] + number end
  sums.num_waiting = waiting(prefix, prefix .. 'queue')
  return sums
end

-- Whether an engine already holds its part if all engines are filled equally, by the scarcer of sequences and cache.
-- Each waiting request is assumed to use kv_tokens of the cache.
local function holds_its_part(all, capacity, kv_tokens)
  if not all then return false end
  local num_seqs, num_tokens = all.held_seqs + all.num_waiting, all.held_tokens + all.num_waiting * kv_tokens
  if num_seqs * all.tokens >= num_tokens * all.seqs then return capacity.held_seqs * all.seqs >= num_seqs * capacity.seqs end
  return capacity.held_tokens * all.tokens >= num_tokens * capacity.tokens
end
