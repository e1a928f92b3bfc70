-- Conversations return to the engine whose cache holds them. Behind claim.lua and others.lua, whose names it uses.
--
-- warm:DIGEST names the engine that last claimed a request with this beginning. A request brings the digests of what its
-- conversation was when it was answered before, the longest first, and its own. At its enqueue it is marked "warm"
-- for the engine that holds the longest beginning, if that lives, and stands in warm_for:ENGINE while it is in its lane.
-- Others leave it alone for affinity_ms of the policy, while its engine has room (delay scheduling: Zaharia et al. 2010).
-- Whose turn it is among tenants and bands does not change, nor what they are charged. Inside a lane an engine may take
-- its own in front of those that came up to LOOK_AHEAD - 1 numbers before: so at most so many pass a request by.

-- Nil where no request was ever marked: a call makes its functions anew, and those who use none of this pay for none.
local warmth
if totals.warm then
  local LOOK_AHEAD, MAX_OWN = 16, 16
  local own = {} -- lane -> {entry, number} of what is warm for this engine, the first of it
  warmth = {num_own = 0}

  for _, id in ipairs(attempt('ZRANGE', prefix .. 'warm_for:' .. engine, 0, MAX_OWN - 1) or {}) do
    local found = fields_of(prefix .. 'request:' .. id, 'warm', 'entry', 'number', 'band', 'tenant')
    if found.warm == engine and found.entry and whole(found.number) and found.band and found.tenant then
      local lane = lane_key(prefix, found.band, found.tenant)
      own[lane] = own[lane] or {}
      table.insert(own[lane], {entry = found.entry, number = tonumber(found.number)})
      warmth.num_own = warmth.num_own + 1
    else
      redis.call('ZREM', prefix .. 'warm_for:' .. engine, id) -- a damaged record has left it there
    end
  end

  -- ms for which a request is left to the engine that it is warm for, which takes kv_tokens there; nil if it is not.
  function warmth.left_for_ms(request, kv_tokens, all)
    local warm, ms = request.warm, queue_policy(prefix).affinity_ms - (now - request.arrived_at)
    if not warm or warm == engine or ms <= 0 then return nil end
    return others.may_take(warm, request, kv_tokens, all) and ms or nil
  end

  -- The first of a lane's that is this engine's and may go in front of its head, as {entry, number}; each is given once.
  local function next_own(lane, head_id)
    if queue_policy(prefix).order ~= 'fcfs' or not own[lane] then return nil end
    local head = whole(fields_of(prefix .. 'request:' .. head_id, 'number').number)
    for i, one in ipairs(own[lane]) do
      if head and one.number > head and one.number - head < LOOK_AHEAD then return table.remove(own[lane], i) end
    end
  end

  -- What to take of a lane with this head: id, payload and hash, and whether it is warm for this engine and better taken
  -- by it than by an emptier one.
  function warmth.next_request(band, tenant, id, payload, request, all)
    local is_own = request.warm == engine
    if not is_own and warmth.num_own == 0 or others.is_too_full(all, room()) then return id, payload, request, false end
    if is_own then return id, payload, request, true end
    local lane = lane_key(prefix, band, tenant)
    local one = next_own(lane, id)
    local found = one and redis.call('XRANGE', lane, one.entry, one.entry)[1]
    if not found then return id, payload, request, false end
    local own_id, own_payload, own_request, is_sound = read_entry(band, tenant, unpack(found))
    local is_due = is_sound and end_if_due(own_id, own_request)
    if is_due then forget_entry(band, tenant, one.entry) end
    local is_fit = is_sound and not is_due and fits(reckoned_kv_tokens(own_request.prompt, own_request.most, 0))
    if not is_fit then return id, payload, request, false end
    return own_id, own_payload, own_request, true
  end

  -- A request has left its lane with this engine.
  function warmth.note_taken(id, request)
    attempt('ZREM', prefix .. 'warm_for:' .. request.warm, id)
    redis.call('HDEL', prefix .. 'request:' .. id, 'warm')
    if request.warm ~= engine then return end
    redis.call('HINCRBY', queue, 'warm_kept', 1)
    warmth.num_own = warmth.num_own - 1
  end
end
