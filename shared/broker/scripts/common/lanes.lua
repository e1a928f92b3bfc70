-- Lanes, one stream per band and tenant, and the order among them.
--
-- ready:BAND holds the tenants with a lane to claim from, by virtual time: the tokens they were given in this band,
-- over their weight. The lowest goes first, so that shares follow weights. clock:BAND in "queue" is the time of the band
-- as a whole: what was given of it, over weight:BAND, the weight of all that were to be claimed from. A tenant without
-- such a lane keeps its time in idle:BAND; it does not save up: it enters at the clock. So it stands behind those that
-- have waited, and however many come, each with little, none who waits is passed by for ever.
-- heads:BAND holds the same tenants as ready:BAND, by the ms at which the first in their lane arrived.
-- A tenant over a quota is in neither, but in "blocked", by the ms at which to look again (infinity: at an end of its).
-- Sources: virtual token counter: Sheng et al. 2024 (arXiv:2401.00588); order by start: start-time fair queueing, Goyal
-- et al. 1996; the clock: generalized processor sharing, Parekh and Gallager 1993.

local function lane_key(prefix, band, tenant) return prefix .. 'lane:' .. band .. ':' .. tenant end
local function due_key(prefix, band, tenant) return prefix .. 'due:' .. band .. ':' .. tenant end

-- ms at which a request entered its lane, by its entry. Numbers of entries do not go back with the clock. Where they are
-- ahead of it, what entered since has its time in its own record (enter_lane), and what entered before is taken to have
-- come when a reaper noticed.
local function arrival_ms(prefix, entry, id)
  local ms = tonumber(string.match(entry, '^%d+'))
  if not ms or ms <= now_ms() + marks.MAX_LEAD_MS then return ms end -- a damaged record has none
  local own = whole(fields_of(prefix .. 'request:' .. tostring(id), 'arrived_at').arrived_at)
  return marks.cut(own or whole(redis.call('HGET', prefix .. 'reaper', 'set_back_at')) or now_ms(), 0)
end

-- The lane's first entry by the policy's order, {entry, fields}; nil if it is empty.
local function first_entry(prefix, band, tenant)
  local lane = lane_key(prefix, band, tenant)
  if queue_policy(prefix).order == 'edf' then
    local due = redis.call('ZRANGE', due_key(prefix, band, tenant), 0, 0)[1]
    if due then return redis.call('XRANGE', lane, due, due)[1] end
  end
  return redis.call('XRANGE', lane, '-', '+', 'COUNT', 1)[1]
end

-- What a call knows of bands, and of lanes whose head it has not noted yet: it hands out many requests one by one.
local known = {clocks = {}, moved_clocks = {}, weights = {}, empty_bands = {}, heads = {}}

local function clock_of(prefix, band)
  known.clocks[band] = known.clocks[band] or amount(redis.call('HGET', prefix .. 'queue', 'clock:' .. band))
  return known.clocks[band]
end

-- The time of a band goes on; write_clocks comes last.
local function set_clock(band, time) known.clocks[band], known.moved_clocks[band] = time, time end

-- Write times that have gone on, and forget tenants without a lane that they have passed.
local function write_clocks(prefix)
  for band, time in pairs(known.moved_clocks) do
    local digits = string.format('%.17g', time)
    redis.call('HSET', prefix .. 'queue', 'clock:' .. band, digits)
    redis.call('ZREMRANGEBYSCORE', prefix .. 'idle:' .. band, '-inf', '(' .. digits)
  end
end

-- The weight of all tenants with a lane to claim from.
local function weight_of(prefix, band)
  known.weights[band] = known.weights[band] or amount(redis.call('HGET', prefix .. 'queue', 'weight:' .. band))
  return known.weights[band]
end

local function open_lane(prefix, band, tenant, head_ms)
  local queue, clock = prefix .. 'queue', clock_of(prefix, band)
  known.empty_bands[band], known.weights[band] = nil, nil
  local own = tonumber(redis.call('ZSCORE', prefix .. 'idle:' .. band, tenant) or clock)
  redis.call('ZREM', prefix .. 'idle:' .. band, tenant)
  if redis.call('ZADD', prefix .. 'ready:' .. band, 'NX', math.max(own, clock), tenant) == 1 then
    -- Noted, since its policy may be another when the lane is shut.
    local weight = tenant_policy(prefix, tenant).weight
    redis.call('HSET', prefix .. 'tenant:' .. tenant, 'weight:' .. band, weight)
    redis.call('HINCRBYFLOAT', queue, 'weight:' .. band, weight)
  end
  redis.call('ZADD', prefix .. 'heads:' .. band, head_ms, tenant)
end

local function shut_lane(prefix, band, tenant)
  local own = redis.call('ZSCORE', prefix .. 'ready:' .. band, tenant)
  if not own then return end
  known.weights[band], known.heads[lane_key(prefix, band, tenant)] = nil, nil
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

-- Put a request at the end of its lane, and write its hash, of which record is a part, with its first event, of that kind.
-- note_entered comes last.
local entered = {}
local function enter_lane(prefix, id, payload, tenant, band, prompt, most, deadline, record, kind)
  local lane = lane_key(prefix, band, tenant)
  local of = entered[lane]
  if not of then
    local before = fields(prefix .. 'tenant:' .. tenant, 'depth:' .. band, 'entered:' .. band)
    of = {tenant = tenant, band = band, was_empty = tonumber(before['depth:' .. band] or 0) == 0,
      number = tonumber(before['entered:' .. band] or 0), depth = 0, tokens = 0}
  end
  local entry = redis.call('XADD', lane, '*', 'id', id, 'request', payload)
  entered[lane] = of -- now, and not before there is something to count
  if deadline then redis.call('ZADD', due_key(prefix, band, tenant), deadline, entry) end
  if tonumber(string.match(entry, '^%d+')) > now_ms() + marks.MAX_LEAD_MS then
    record[#record + 1], record[#record + 2] = 'arrived_at', now_ms()
  end
  of.first, of.first_id = of.first or entry, of.first_id or id
  of.depth, of.tokens, of.number = of.depth + 1, of.tokens + prompt + most, of.number + 1
  record[#record + 1], record[#record + 2] = note_move(prefix, id, tenant, band, kind, 0, '',
    '\n\n\n0\n' .. prompt .. '\n' .. most)
  redis.call('HSET', prefix .. 'request:' .. id, 'state', 'queued', 'count', '0', 'entry', entry, 'number', of.number,
    'tenant', tenant, 'band', band, unpack(record))
end

-- Of what has entered, how many may have a sequence that an engine of so many keeps for tenants with few.
local function num_entered_for_kept(prefix, num_seqs)
  if not is_shared(redis.call('HGET', prefix .. 'queue', 'shared_at')) then return math.huge end
  local number = 0
  for _, of in pairs(entered) do
    if not has_equal_part(prefix, of.tenant, num_seqs) then number = number + of.depth end
  end
  return number
end

-- Count what has entered lanes; once for each lane, however many requests. preferred is as of wake_engines.
local function note_entered(prefix, preferred)
  local num_entered = 0
  for _, of in pairs(entered) do
    num_entered = num_entered + of.depth
    local owner, band = prefix .. 'tenant:' .. of.tenant, of.band
    redis.call('HINCRBY', owner, 'depth:' .. band, of.depth)
    redis.call('HINCRBY', owner, 'tokens:' .. band, of.tokens)
    redis.call('HSET', owner, 'entered:' .. band, of.number)
    redis.call('HINCRBY', prefix .. 'queue', 'entered:' .. band, of.depth)
    redis.call('HINCRBY', prefix .. 'queue', 'depth:' .. band, of.depth)
    redis.call('HINCRBY', prefix .. 'queue', 'tokens:' .. band, of.tokens)
    if of.was_empty then
      redis.call('SADD', prefix .. 'active', of.tenant)
      if redis.call('SCARD', prefix .. 'active') > 1 then redis.call('HSET', prefix .. 'queue', 'shared_at', now_ms()) end
      if not redis.call('ZSCORE', prefix .. 'blocked', of.tenant) then
        open_lane(prefix, band, of.tenant, arrival_ms(prefix, of.first, of.first_id))
      end
    end
  end
  local function num_for_kept(num_seqs) return num_entered_for_kept(prefix, num_seqs) end
  wake_engines(prefix, num_entered, num_for_kept, preferred)
end

-- Set what is counted of a lane; the sums of all follow.
local function recount(prefix, band, tenant, depth, tokens)
  local owner, queue = prefix .. 'tenant:' .. tenant, prefix .. 'queue'
  local before_depth, before_tokens = waiting_in(owner, band)
  local function set(field, before, now)
    local change = now - (tonumber(before or 0) or 0)
    if change == 0 then return end
    redis.call('HSET', owner, field, now)
    redis.call('HINCRBY', queue, field, change)
  end
  set('depth:' .. band, before_depth, depth)
  set('tokens:' .. band, before_tokens, tokens)
end

-- Take an entry out of its lane, wherever it stands there; tidy_lane comes next.
local function leave_lane(prefix, entry, tenant, band, tokens, deadline)
  redis.call('XDEL', lane_key(prefix, band, tenant), entry)
  if deadline then redis.call('ZREM', due_key(prefix, band, tenant), entry) end
  for _, key in ipairs({prefix .. 'tenant:' .. tenant, prefix .. 'queue'}) do
    add_to(key, 'depth:' .. band, -1)
    add_to(key, 'tokens:' .. band, 0 - tokens) -- not -tokens, which makes "-0" of nothing
  end
end

-- Write the heads of lanes that have got other ones.
local function note_heads(prefix)
  for _, of in pairs(known.heads) do redis.call('ZADD', prefix .. 'heads:' .. of.band, 'XX', of.ms, of.tenant) end
  known.heads = {}
end

-- After entries have left a lane: it goes if it is empty, else its head is noted, in note_heads if that is called before
-- anybody reads it (is_later). Returns the head, which may be given: false if it is known that there is none. A count that
-- a damaged record has put out ends with the lane.
local function tidy_lane(prefix, band, tenant, head, is_later)
  local lane = lane_key(prefix, band, tenant)
  if head == nil then head = first_entry(prefix, band, tenant) end
  if not head then
    redis.call('DEL', lane, due_key(prefix, band, tenant))
    recount(prefix, band, tenant, 0, 0)
    shut_lane(prefix, band, tenant)
  else
    known.heads[lane] = {band = band, tenant = tenant, ms = arrival_ms(prefix, head[1], head[2][2])}
    if not is_later then note_heads(prefix) end
  end
  return head
end

-- Throw away an entry that stands for no request; returns the head after it. It may have been counted, if it once did.
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

-- Give a tenant tokens of a band, or take some back. A band may have been removed while its last requests ran.
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
