-- A claim's way through the lanes; put behind claim.lua, whose names it uses.
local skipped = {num = 0}

-- Set an entry aside that a stranger wrote into a lane.
local function set_entry_aside(lane, entry, content)
  local id = 'entry-' .. entry .. '-' .. redis.sha1hex(lane):sub(1, 8)
  redis.call('HSET', prefix .. 'parked:' .. id, 'fields', cmsgpack.pack(content), 'parked_at_ms', now)
  redis.call('ZADD', prefix .. 'dead', now, id)
end

-- The request at the head of a lane, as id, payload and hash; nil if there was none to run: it is out of the way then.
local function head_request(band, tenant)
  local lane = lane_key(prefix, band, tenant)
  local head = first_of(band, tenant)
  if not head then return tidy_lane(prefix, band, tenant) end
  local entry, content = unpack(head)
  local id, payload, request, is_sound = read_entry(band, tenant, entry, content)
  if not is_sound then
    if not request then
      set_entry_aside(lane, entry, content)
    elseif standing_of(prefix, id, entry, request.state, request.entry) ~= 'stray' then
      set_aside(prefix, id, {tenant = tenant, band = band, entry = entry, payload = payload})
    end
    read_ahead[lane] = nil
    drop_entry(prefix, entry, tenant, band)
    return nil
  end
  if end_if_due(id, request) then
    read_ahead[lane] = nil
    return nil
  end
  return id, payload, request
end

-- Take a request of a lane, which has its turn, and charge its tenant what is to be expected.
local has_started_one = false
local function take_from_lane(turn, band, id, payload, request, wanted)
  local tenant, tokens = turn.tenant, request.prompt + math.min(request.most, mean_output)
  local of = tenant_policy(prefix, tenant)
  -- First, so that it is found among the claims of this engine should the sums below be damaged, and stop the script.
  redis.call('SET', prefix .. 'payload:' .. id, payload)
  take(id, payload, request, wanted, tokens)
  local after, clock = turn.time + tokens / of.weight, clock_of(prefix, band)
  -- Not beyond the tenant's own time: estimates that are too high, and are taken back at the end, must not add up.
  local weight = math.max(weight_of(prefix, band), of.weight)
  set_clock(band, math.max(turn.time, clock, math.min(after, clock + tokens / weight)))
  redis.call('ZADD', prefix .. 'ready:' .. band, after, tenant)
  if has_rate_quota(of) then use(prefix, tenant, 1, tokens, now) end
  add_to(prefix .. 'tenant:' .. tenant, 'num_started', 1)
  if not has_started_one then service.note_under_way(prefix) end
  if has_started_one then
    add_to(queue, 'num_started', 1)
  elseif redis.call('HINCRBY', queue, 'num_started', 1) == 1 then
    redis.call('HSET', queue, 'rate_at', now)
  end
  has_started_one = true
  leave_lane(prefix, request.entry, tenant, band, request.prompt + request.most, request.deadline)
  forget_entry(band, tenant, request.entry)
  if request.warm and warmth then warmth.note_taken(id, request) end
  tidy_lane(prefix, band, tenant, first_of(band, tenant) or false, true)
  settle_turn(prefix, turn, tokens)
end

local all = all_rooms(prefix, engine, room())
local num_before, tokens_before = num_taken, taken_tokens

-- Leave a lane alone for the rest of this wave; false if that is enough of it.
local function pass_by(band, tenant)
  if skipped.num == MAX_SKIPPED_LANES then return false end
  skipped[lane_key(prefix, band, tenant)], skipped.num = true, skipped.num + 1
  return true
end

-- The band of which the engine takes only what is warm for it any more, the rest being left to others for a moment.
local own_only

-- One step through the lanes; returns false when there is nothing more to take.
local function advance()
  local turn = next_turn(prefix, skipped)
  if not turn then return false end
  local band, tenant = queue_policy(prefix).bands[turn.level], turn.tenant
  local may_at = may_start_at(prefix, tenant)
  if may_at > 0 then
    block(prefix, tenant, may_at)
    has_blocked = true
    return true
  end
  if own_only and own_only ~= band then return false end
  if num_taken >= most_for_all and has_equal_part(prefix, tenant, limit + held) then return pass_by(band, tenant) end
  local id, payload, request, is_own = head_request(band, tenant)
  if not id then return true end
  if warmth then
    id, payload, request, is_own = warmth.next_request(band, tenant, id, payload, request, all)
  end
  local wanted = reckoned_kv_tokens(request.prompt, request.most, 0)
  local left_ms = warmth and warmth.left_for_ms(request, wanted, all)
  if adapters and not left_ms then
    left_ms = adapters.left_for_ms(request, wanted, all)
    is_own = is_own or adapters.is_own(request, all)
  end
  if left_ms then
    retry_in(left_ms)
    if pass_by(band, tenant) then return true end
    retry_in(CROWDED_MS)
    return false
  end
  -- What waits is taken to be like what this wave has seen of it: what clients ask for says little of what comes.
  local mean_wanted = (taken_tokens - tokens_before + wanted) / (num_taken - num_before + 1)
  local age = now - request.arrived_at
  if not is_own and (own_only or age < PATIENCE_MS and has_its_part(all, room(), mean_wanted)) then
    retry_in(math.max(1, PATIENCE_MS - age))
    own_only = band
    if request.warm == engine then wake_engines(prefix, 1) end -- this one was woken for it, being too full as it is
    return warmth ~= nil and warmth.num_own > 0 and pass_by(band, tenant)
  end
  if fits(wanted) then
    take_from_lane(turn, band, id, payload, request, wanted)
    return true
  end
  return not reserve() and pass_by(band, tenant)
end

-- What was taken is counted, should the next one meet what others than scripts have written, and stop the script.
local is_done, failure = pcall(function()
  local num_looks = 0
  while num_taken < limit and advance() do
    num_looks = num_looks + 1
    if num_looks == limit + MAX_LOOKS then return retry_in(0) end
  end
end)
write_counts()
write_clocks(prefix)
if not is_done then error(failure, 0) end

local first_blocked = has_blocked and redis.call('ZRANGE', prefix .. 'blocked', 0, 0, 'WITHSCORES')[2]
if first_blocked and first_blocked ~= 'inf' then retry_in(math.max(1, tonumber(first_blocked) - now)) end
return reply(true)
