-- Whose turn it is: among bands, among the tenants of a band, and among engines. Put in front of claim.lua.

-- The tenant whose turn it is in a band, and its virtual time. skipped is a set of lanes to pass by, and their number.
local function next_tenant(prefix, band, skipped)
  if known.empty_bands[band] then return nil end
  for i = 0, skipped.num do
    local tenant, time = unpack(redis.call('ZRANGE', prefix .. 'ready:' .. band, i, i, 'WITHSCORES'))
    if not tenant then
      known.empty_bands[band] = i == 0 or nil
      return nil
    end
    if not skipped[lane_key(prefix, band, tenant)] then return tenant, tonumber(time) end
  end
end

-- Whether work of a lower band has waited so long that it counts as of this one.
local function has_aged_below(prefix, level, tenants)
  local bands, ageing_ms = queue_policy(prefix).bands, limit_of(queue_policy(prefix).ageing_s) * 1000
  for lower = level + 1, #bands do
    if tenants[lower] then note_heads(prefix) end
    local head = tenants[lower] and redis.call('ZRANGE', prefix .. 'heads:' .. bands[lower], 0, 0, 'WITHSCORES')[2]
    if head and now_ms() - tonumber(head) >= ageing_ms * (lower - level) then return true end
  end
  return false
end

-- The turn among bands: the level of the band and the tenant that have it, with the tenant's virtual time; gave_way, the
-- bands that gave way to it; and whether its band holds it against aged work. The highest band with work goes first. When
-- work below it has aged, the bands below have what the strictness leaves of each token that goes to it, saved as its
-- "credit".
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

-- A turn was used for so many tokens.
local function settle_turn(prefix, turn, tokens)
  local queue, bands, strictness = prefix .. 'queue', queue_policy(prefix).bands, queue_policy(prefix).strictness
  for _, band in ipairs(turn.gave_way) do redis.call('HINCRBYFLOAT', queue, 'credit:' .. band, -tokens) end
  if turn.is_against_aged then
    redis.call('HINCRBYFLOAT', queue, 'credit:' .. bands[turn.level], tokens * (1 - strictness) / strictness)
  end
end

-- What all engines can hold and hold, and how many requests wait. room is this engine's. Returns nil if it is alone.
local function all_rooms(prefix, engine, room)
  local sums = other_rooms(prefix, engine)
  if not sums then return nil end
  for field, number in pairs(room) do sums[field] = sums[field] + number end
  sums.num_waiting = waiting(prefix, prefix .. 'queue')
  return sums
end

-- Whether an engine holds its part already, all being filled alike, by the scarcer of sequences and cache. room is as it
-- is now; each request that waits takes kv_tokens of the cache on the average.
local function has_its_part(all, room, kv_tokens)
  if not all then return false end
  local num_seqs, num_tokens = all.held_seqs + all.num_waiting, all.held_tokens + all.num_waiting * kv_tokens
  if num_seqs * all.tokens >= num_tokens * all.seqs then return room.held_seqs * all.seqs >= num_seqs * room.seqs end
  return room.held_tokens * all.tokens >= num_tokens * room.tokens
end
