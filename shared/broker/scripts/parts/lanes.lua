-- uses: capacity, events
-- Lanes, one stream per band and tenant, and the order among them.
--
-- ready:BAND has the tenants with a lane to claim from, by virtual time: the tokens that were charged to them in this
-- band, over their weight. The lowest goes first, so that shares follow weights. clock:BAND in "queue" is the virtual
-- time of the whole band: the tokens charged in it, over weight:BAND, the weight of all tenants in ready:BAND. A tenant
-- without such a lane retains its time in idle:BAND, but saves nothing up: it enters at the clock. So it enters behind
-- the tenants that have waited, and however many tenants with few requests arrive, no waiting tenant is overtaken for
-- ever.
-- heads:BAND has the same tenants as ready:BAND, by the ms at which the first request in their lane arrived.
-- A tenant over a quota is in neither, but in "blocked", by the ms at which to check it again (infinity: when one of
-- its requests ends).
-- Sources: virtual token counter: Sheng et al. 2024 (arXiv:2401.00588); order by start: start-time fair queueing, Goyal
-- et al. 1996; the clock: generalized processor sharing, Parekh and Gallager 1993.

local function lane_key(prefix, band, tenant) return prefix .. 'lane:' .. band .. ':' .. tenant end
local function due_key(prefix, band, tenant) return prefix .. 'due:' .. band .. ':' .. tenant end

-- Return the ms at which a request entered its lane, by its entry. Entry ids do not go back with the clock. While they
-- are ahead of it, a new request has its time in its record (enter_lane), and an older one is assumed to have arrived
-- when a reaper noticed the change of the clock.
local function arrival_ms(prefix, entry, id)
  local ms = tonumber(string.match(entry, '^%d+'))
  if not ms or ms <= now_ms() + marks.MAX_LEAD_MS then return ms end -- a damaged record has none
  local own = whole(fields_of(prefix .. 'request:' .. tostring(id), 'arrived_at').arrived_at)
  return marks.cut(own or whole(redis.call('HGET', prefix .. 'reaper', 'set_back_at')) or now_ms(), 0)
end

-- Return the first entry of a lane in the policy's order, {entry, fields}; nil if the lane is empty.
local function first_entry(prefix, band, tenant)
  local lane = lane_key(prefix, band, tenant)
  if queue_policy(prefix).order == 'edf' then
    local due = redis.call('ZRANGE', due_key(prefix, band, tenant), 0, 0)[1]
    if due then return redis.call('XRANGE', lane, due, due)[1] end
  end
  return redis.call('XRANGE', lane, '-', '+', 'COUNT', 1)[1]
end

-- State of bands that this call has read or will write, since a claim handles many requests one by one; and lanes whose
-- new head is not written yet.
local band_state = {clocks = {}, moved_clocks = {}, weights = {}, empty_bands = {}, heads = {}}

local function clock_of(prefix, band)
  band_state.clocks[band] = band_state.clocks[band] or amount(redis.call('HGET', prefix .. 'queue', 'clock:' .. band))
  return band_state.clocks[band]
end

-- Advance the time of a band. Call write_clocks last.
local function set_clock(band, time) band_state.clocks[band], band_state.moved_clocks[band] = time, time end

-- Write advanced times, and forget tenants without a lane that they have passed.
local function write_clocks(prefix)
  for band, time in pairs(band_state.moved_clocks) do
    local digits = string.format('%.17g', time)
    redis.call('HSET', prefix .. 'queue', 'clock:' .. band, digits)
    redis.call('ZREMRANGEBYSCORE', prefix .. 'idle:' .. band, '-inf', '(' .. digits)
  end
end

-- Return the weight of all tenants with a lane to claim from.
local function weight_of(prefix, band)
  band_state.weights[band] = band_state.weights[band] or amount(redis.call('HGET', prefix .. 'queue', 'weight:' .. band))
  return band_state.weights[band]
end

local function open_lane(prefix, band, tenant, head_ms)
  local queue, clock = prefix .. 'queue', clock_of(prefix, band)
  band_state.empty_bands[band], band_state.weights[band] = nil, nil
  local own = tonumber(redis.call('ZSCORE', prefix .. 'idle:' .. band, tenant) or clock)
  redis.call('ZREM', prefix .. 'idle:' .. band, tenant)
  if redis.call('ZADD', prefix .. 'ready:' .. band, 'NX', math.max(own, clock), tenant) == 1 then
    -- Stored, since its policy may have changed when the lane is shut.
    local weight = tenant_policy(prefix, tenant).weight
    redis.call('HSET', prefix .. 'tenant:' .. tenant, 'weight:' .. band, weight)
    redis.call('HINCRBYFLOAT', queue, 'weight:' .. band, weight)
  end
  redis.call('ZADD', prefix .. 'heads:' .. band, head_ms, tenant)
end

local function shut_lane(prefix, band, tenant)
  local own = redis.call('ZSCORE', prefix .. 'ready:' .. band, tenant)
  if not own then return end
  band_state.weights[band], band_state.heads[lane_key(prefix, band, tenant)] = nil, nil
  local weight = redis.call('HGET', prefix .. 'tenant:' .. tenant, 'weight:' .. band)
  redis.call('HDEL', prefix .. 'tenant:' .. tenant, 'weight:' .. band)
  redis.call('HINCRBYFLOAT', prefix .. 'queue', 'weight:' .. band, 0 - (weight or tenant_policy(prefix, tenant).weight))
  redis.call('ZREM', prefix .. 'ready:' .. band, tenant)
  redis.call('ZREM', prefix .. 'heads:' .. band, tenant)
  redis.call('ZADD', prefix .. 'idle:' .. band, own, tenant)
end

local function block(prefix, tenant, until_ms)
  for _, band in ipairs(queue_policy(prefix).bands) do shut_lane(prefix, band, tenant) end
  redis.call('ZADD', prefix .. 'blocked', until_ms == math.huge and '+inf' or until_ms, tenant)
end

local function unblock(prefix, tenant)
  if redis.call('ZREM', prefix .. 'blocked', tenant) == 0 then return end
  for _, band in ipairs(queue_policy(prefix).bands) do
    local head = first_entry(prefix, band, tenant)
    if head then open_lane(prefix, band, tenant, arrival_ms(prefix, head[1], head[2][2])) end
  end
  local may_start = limit_of(tenant_policy(prefix, tenant).max_concurrent_requests) - num_started(prefix, tenant)
  wake_engines(prefix, math.min(may_start, (waiting(prefix, prefix .. 'tenant:' .. tenant))))
end

-- Return the cause in the event of a request that enters its lane: "waiting_for_wake" if no engine claims, and devices
-- may wake one (homes.lua).
local entry_cause
local function waiting_cause(prefix)
  if not entry_cause then
    local is_asleep = redis.call('EXISTS', prefix .. 'homes') == 1 and redis.call('EXISTS', prefix .. 'rooms') == 0
    entry_cause = is_asleep and 'waiting_for_wake' or ''
  end
  return entry_cause
end

-- Append a request to its lane and write its hash, of which record is a part, with its first event, of this kind. Call
-- count_entered last.
local entered = {}
local function enter_lane(prefix, id, payload, tenant, band, prompt, most, deadline, record, kind)
  local lane = lane_key(prefix, band, tenant)
  local sums = entered[lane]
  if not sums then
    local before = fields(prefix .. 'tenant:' .. tenant, 'depth:' .. band, 'entered:' .. band)
    sums = {tenant = tenant, band = band, was_empty = tonumber(before['depth:' .. band] or 0) == 0,
      number = tonumber(before['entered:' .. band] or 0), depth = 0, tokens = 0}
  end
  local entry = redis.call('XADD', lane, '*', 'id', id, 'request', payload)
  entered[lane] = sums -- not before the entry is written, so that there is something to count
  if deadline then redis.call('ZADD', due_key(prefix, band, tenant), deadline, entry) end
  if tonumber(string.match(entry, '^%d+')) > now_ms() + marks.MAX_LEAD_MS then
    record[#record + 1], record[#record + 2] = 'arrived_at', now_ms()
  end
  sums.first, sums.first_id = sums.first or entry, sums.first_id or id
  sums.depth, sums.tokens, sums.number = sums.depth + 1, sums.tokens + prompt + most, sums.number + 1
  record[#record + 1], record[#record + 2] = note_move(prefix, id, tenant, band, kind, 0, '',
    '\n\n' .. waiting_cause(prefix) .. '\n0\n' .. prompt .. '\n' .. most)
  redis.call('HSET', prefix .. 'request:' .. id, 'state', 'queued', 'count', '0', 'entry', entry, 'number', sums.number,
    'tenant', tenant, 'band', band, unpack(record))
end

-- Return how many of the requests that entered may have a sequence which an engine with num_seqs reserves for tenants
-- with few running requests.
local function num_entered_for_kept(prefix, num_seqs)
  if not is_shared(redis.call('HGET', prefix .. 'queue', 'shared_at')) then return math.huge end
  local number = 0
  for _, sums in pairs(entered) do
    if not has_equal_part(prefix, sums.tenant, num_seqs) then number = number + sums.depth end
  end
  return number
end

-- Count the requests that entered lanes, once per lane, and wake engines. preferred is as in wake_engines.
local function count_entered(prefix, preferred)
  local num_entered = 0
  for _, sums in pairs(entered) do
    num_entered = num_entered + sums.depth
    local owner, band = prefix .. 'tenant:' .. sums.tenant, sums.band
    redis.call('HINCRBY', owner, 'depth:' .. band, sums.depth)
    redis.call('HINCRBY', owner, 'tokens:' .. band, sums.tokens)
    redis.call('HSET', owner, 'entered:' .. band, sums.number)
    redis.call('HINCRBY', prefix .. 'queue', 'entered:' .. band, sums.depth)
    redis.call('HINCRBY', prefix .. 'queue', 'depth:' .. band, sums.depth)
    redis.call('HINCRBY', prefix .. 'queue', 'tokens:' .. band, sums.tokens)
    if sums.was_empty then
      redis.call('SADD', prefix .. 'active', sums.tenant)
      if redis.call('SCARD', prefix .. 'active') > 1 then redis.call('HSET', prefix .. 'queue', 'shared_at', now_ms()) end
      if not redis.call('ZSCORE', prefix .. 'blocked', sums.tenant) then
        open_lane(prefix, band, sums.tenant, arrival_ms(prefix, sums.first, sums.first_id))
      end
    end
  end
  local function num_for_kept(num_seqs) return num_entered_for_kept(prefix, num_seqs) end
  wake_engines(prefix, num_entered, num_for_kept, preferred)
end

-- Set the counts of a lane, and update the sums.
local function recount(prefix, band, tenant, depth, tokens)
  local owner, queue = prefix .. 'tenant:' .. tenant, prefix .. 'queue'
  local before_depth, before_tokens = waiting_in(owner, band)
  local function set(field, before, after)
    local change = after - (tonumber(before or 0) or 0)
    if change == 0 then return end
    redis.call('HSET', owner, field, after)
    redis.call('HINCRBY', queue, field, change)
  end
  set('depth:' .. band, before_depth, depth)
  set('tokens:' .. band, before_tokens, tokens)
end

-- Remove an entry from its lane, at any position. Call tidy_lane next.
local function leave_lane(prefix, entry, tenant, band, tokens, deadline)
  redis.call('XDEL', lane_key(prefix, band, tenant), entry)
  if deadline then redis.call('ZREM', due_key(prefix, band, tenant), entry) end
  for _, key in ipairs({prefix .. 'tenant:' .. tenant, prefix .. 'queue'}) do
    add_to(key, 'depth:' .. band, -1)
    add_to(key, 'tokens:' .. band, 0 - tokens) -- not -tokens, which would be "-0" for 0 tokens
  end
end

-- Write the heads of lanes that have changed.
local function note_heads(prefix)
  for _, head in pairs(band_state.heads) do
    redis.call('ZADD', prefix .. 'heads:' .. head.band, 'XX', head.ms, head.tenant)
  end
  band_state.heads = {}
end

-- Delete a lane if it is empty, else update its head. Call it after removing entries. The head is written by
-- note_heads, immediately or, with is_later, when the caller calls that. head may be passed: false if there is none.
-- Returns the head. A count that a damaged record has made wrong ends with the lane.
local function tidy_lane(prefix, band, tenant, head, is_later)
  local lane = lane_key(prefix, band, tenant)
  if head == nil then head = first_entry(prefix, band, tenant) end
  if not head then
    redis.call('DEL', lane, due_key(prefix, band, tenant))
    recount(prefix, band, tenant, 0, 0)
    shut_lane(prefix, band, tenant)
  else
    band_state.heads[lane] = {band = band, tenant = tenant, ms = arrival_ms(prefix, head[1], head[2][2])}
    if not is_later then note_heads(prefix) end
  end
  return head
end

-- Delete an entry that belongs to no request. Returns the head after it. The entry may have been counted, if it once
-- did.
local function drop_entry(prefix, entry, tenant, band)
  local lane = lane_key(prefix, band, tenant)
  redis.call('XDEL', lane, entry)
  redis.call('ZREM', due_key(prefix, band, tenant), entry)
  local head = tidy_lane(prefix, band, tenant)
  if head then
    local before, tokens = waiting_in(prefix .. 'tenant:' .. tenant, band)
    local depth = redis.call('XLEN', lane)
    before, tokens = tonumber(before or 0) or 0, tonumber(tokens or 0) or 0
    if before > depth then
      recount(prefix, band, tenant, depth, math.floor(tokens * depth / before))
    end
  else
    forget_idle(prefix, tenant)
  end
  return head
end

-- Charge a tenant tokens of a band; negative tokens are a refund. The band may have been removed while its last
-- requests ran.
local function charge(prefix, band, tenant, tokens)
  local shift = tokens / tenant_policy(prefix, tenant).weight
  if redis.call('ZSCORE', prefix .. 'ready:' .. band, tenant) then
    redis.call('ZINCRBY', prefix .. 'ready:' .. band, shift, tenant)
  elseif redis.call('ZSCORE', prefix .. 'idle:' .. band, tenant) then
    redis.call('ZINCRBY', prefix .. 'idle:' .. band, shift, tenant)
  elseif shift > 0 and has_band(prefix, band) then
    redis.call('ZADD', prefix .. 'idle:' .. band, clock_of(prefix, band) + shift, tenant)
  end
end
