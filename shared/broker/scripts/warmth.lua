-- Conversations return to the engine whose cache holds them. Put in front of claim.lua; enqueue.lua sets the marks.
--
-- warm:DIGEST names the engine that last claimed a request with this beginning. A request brings the digests of what its
-- conversation was when it was answered before, the longest first, and its own. At its enqueue it is marked "warm"
-- for the engine that holds the longest beginning, if that lives, and stands in warm_for:ENGINE while it is in its lane.
-- Others leave it alone for affinity_ms of the policy, while its engine has room (delay scheduling: Zaharia et al. 2010).
-- Whose turn it is among tenants and bands does not change, nor what they are charged. Inside a lane an engine may take
-- its own in front of those that came up to LOOK_AHEAD - 1 numbers before: so at most so many pass a request by.

local LOOK_AHEAD, MAX_OWN = 16, 16
-- An engine is too full for what is warm for it once it holds half more than its part, and so much of its sequences.
local TOO_FULL, TOO_FULL_SEQS = 1.5, 1 / 8

-- Whether an engine with this room holds so much more than its part that others had better take what is warm for it.
local function is_too_full(all, room)
  if not all then return false end
  local part = (all.held_seqs + all.num_waiting) * room.seqs / math.max(1, all.seqs)
  return room.held_seqs > TOO_FULL * part + TOO_FULL_SEQS * room.seqs
end

-- Whether a request of that age, which takes kv_tokens, is left to the engine that it is warm for.
local function is_left_to(prefix, engine, age, kv_tokens, all)
  if age >= queue_policy(prefix).affinity_ms then return false end
  local lease = redis.call('ZSCORE', prefix .. 'leases', engine)
  local room = read_room(redis.call('HGET', prefix .. 'rooms', engine))
  if not (lease and tonumber(lease) > now_ms() and room) or redis.call('GET', prefix .. 'ward') == engine then
    return false
  end
  local fits = room.held_seqs == 0 or room.held_tokens + kv_tokens <= room.tokens
  return room.held_seqs < room.seqs and fits and not is_too_full(all, room)
end

-- What waits in lanes and is warm for an engine, the first of it: lane -> list of {entry, number}, and how many.
local function own_requests(prefix, engine)
  local lanes, key = {num = 0}, prefix .. 'warm_for:' .. engine
  for _, id in ipairs(attempt('ZRANGE', key, 0, MAX_OWN - 1) or {}) do
    local now = fields_of(prefix .. 'request:' .. id, 'warm', 'entry', 'number', 'band', 'tenant')
    if now.warm == engine and now.entry and whole(now.number) and now.band and now.tenant then
      local lane = lane_key(prefix, now.band, now.tenant)
      lanes[lane] = lanes[lane] or {}
      table.insert(lanes[lane], {entry = now.entry, number = tonumber(now.number)})
      lanes.num = lanes.num + 1
    else
      redis.call('ZREM', key, id) -- a damaged record has left it there
    end
  end
  return lanes
end
