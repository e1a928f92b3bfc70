-- uses: turns, affinity
-- Claim a wave of requests for an engine, as many as it can admit, and renew its lease.
-- KEYS: leases. ARGV: prefix, engine, lease_ttl_ms, limit, held, kv_tokens, held_kv_tokens, kept.
--   limit            number of sequences the engine can take in addition to the held ones
--   held             number of sequences the engine holds
--   kv_tokens        capacity of its KV cache in tokens, of which held_kv_tokens are reserved
--   kept             number of its sequences that are reserved for tenants with few running requests
-- Each claim gives its request another epoch, which fences all later writes.
--
-- Returns {wave, retry_ms, is_saving}. wave is a list of {id, payload, epoch, count, attempts, alone_until, kv_tokens,
-- expires_in_ms, waited_ms}:
--   alone_until      -1, or the output length until which the engine must not claim another request, because this one
--                    may have killed its previous engine
--   kv_tokens        the request's estimated use of the cache
--   expires_in_ms    -1 without a deadline
--   waited_ms        time since the request entered its lane
-- retry_ms is when to claim again without a wake: 0 if this claim examined only part of the queue, -1 if unknown.
-- is_saving is 1 if the engine must not claim from other queues either: it drains for a suspect, or reserves its cache
-- for a large request.
--
-- Claims come from three sources, in this order: suspects (if the engine is idle), returned requests, and the lanes.
local prefix, engine, limit, held = ARGV[1], ARGV[2], tonumber(ARGV[4]), tonumber(ARGV[5])
local kv_tokens, held_kv_tokens, num_kept = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])
local time_ms, queue = now_ms(), prefix .. 'queue'
local LIMITS = { -- one table, since a script has at most 200 local names
  WARD_AFTER_MS = 2000, WARD_TTL_MS = 10000,
  RESERVED_TTL_MS = 10000, -- for how long a cache stays reserved for a request that does not fit yet
  MAX_SKIPPED_LANES = 8, MAX_TURNS = 200, MAX_READ_AHEAD = 16,
  CROWDED_MS = 10, -- retry delay after MAX_SKIPPED_LANES lanes that are left to others, which claim them soon
  OUTPUT_TOKENS = 256, -- expected output length while no request of the model has ended
}

gather_counts()
marks.set_lease(prefix, 'leases', engine, tonumber(ARGV[3]))
local totals = fields(queue, 'paused', 'mean_output', 'shared_at', 'warm', 'adapters', 'budgets')
marks.budgets = totals.budgets or false
if totals.paused then return {{}, -1, 0} end
local mean_output = math.ceil(amount(totals.mean_output or LIMITS.OUTPUT_TOKENS))

-- The claims of this call so far, and the rest of the reply.
local wave, claimed_tokens, retry_ms, is_saving = {}, 0, -1, 0
-- The facts about this call that affinity.lua needs. all is set before the lanes are claimed from.
local claim = {prefix = prefix, engine = engine, time_ms = time_ms, num_kept = num_kept, shared_at = totals.shared_at}

local function retry_in(ms)
  if retry_ms < 0 or ms < retry_ms then retry_ms = ms end
end

-- Return this engine's capacity and load, in sequences and cache tokens, as the claims of other engines read it.
local function capacity()
  return {seqs = limit + held, held_seqs = held + #wave, tokens = kv_tokens,
    held_tokens = held_kv_tokens + claimed_tokens}
end

-- Write the state that other claims read and return the reply. may_wake: whether to wake the engine for new requests,
-- which it must not be while it runs a suspect or drains for one.
local function reply(may_wake)
  write_counts()
  note_heads(prefix)
  set_capacity(prefix, engine, capacity())
  if may_wake and #wave < limit then set_vacant(prefix, engine, capacity(), num_kept) end
  return {wave, retry_ms, is_saving}
end

-- Estimate a request's use of the cache with half of its expected output, so that the cache is full on average and
-- rarely overcommitted.
local function estimated_kv_tokens(request, count)
  local remaining = math.max(1, math.min(request.most, mean_output) - count)
  return math.min(kv_tokens, request.prompt + count + math.ceil(remaining / 2))
end

local function fits(request_tokens)
  return held + #wave == 0 or held_kv_tokens + claimed_tokens + request_tokens <= kv_tokens
end

-- Reserve this engine's cache for the next request in order, which does not fit yet: it claims nothing behind that
-- request. Only one engine reserves at a time; others skip the lane. Returns whether it is this one.
local function reserve()
  local holder = redis.call('GET', prefix .. 'reserved')
  if holder and holder ~= engine and redis.call('PTTL', prefix .. 'reserved') <= LIMITS.RESERVED_TTL_MS then
    return false
  end
  redis.call('SET', prefix .. 'reserved', engine, 'PX', LIMITS.RESERVED_TTL_MS)
  is_saving = 1
  return true
end

-- Return the fields of a request, with id and payload. is_sound: whether they are valid, and the request is queued.
local function read_request(id, payload)
  local request = fields_of(prefix .. 'request:' .. id, 'state', 'count', 'prompt', 'max', 'deadline', 'acquittals',
    'entry', 'arrived_at', 'epoch', 'attempts', 'tenant', 'band', 'line', 'digests', 'warm', 'adapter', 'past')
  local prompt, most = whole(request.prompt), whole(request.max)
  request.is_sound = prompt and most and whole(request.count) and whole(request.epoch)
    and (not request.attempts or whole(request.attempts)) and (not request.deadline or whole(request.deadline))
    and request.state == 'queued' and request.tenant and request.band
  request.id, request.payload, request.prompt, request.most = id, payload, prompt, most
  request.arrived_at = request.entry and arrival_ms(prefix, request.entry, id) or whole(request.arrived_at)
  return request
end

-- End a request that is past its deadline. expire_due below ends only up to 100 requests.
local function end_if_due(request)
  local is_due = request.deadline and tonumber(request.deadline) <= time_ms
  if is_due then stop_request(prefix, request.id, 'expired') end
  return is_due
end

-- End a request that was never claimed if a budget is used up: only requests that run already may exceed it.
local function end_if_over_budget(request)
  if marks.budgets ~= 'used up' then return false end
  local account = fields_of(prefix .. 'request:' .. request.id, 'account').account
  local refusal = open_budgets().refusal(prefix, request.tenant, account)
  if refusal then
    local _, scope, period, unit, limit = unpack(refusal)
    if string.find(limit, 'e-', 1, true) then limit = string.gsub(string.format('%.16f', limit), '0+$', '') end
    end_request(prefix, request.id, 'failed', 'error', 'insufficient_quota', 'the budget of its ' .. scope .. ' is used up: '
      .. limit .. ' ' .. unit .. (period == 'all' and '' or ' per ' .. period))
  end
  return refusal ~= nil
end

-- Claim a request. charged is the number of tokens its tenant is charged, at its first claim only.
local function claim_request(request, request_tokens, charged, is_suspect)
  local id, key, count = request.id, prefix .. 'request:' .. request.id, tonumber(request.count)
  local warm_ttl_s = request.digests and queue_policy(prefix).warm_ttl_s or cjson.null
  if warm_ttl_s ~= cjson.null then -- requests that continue this conversation should come to this engine
    for digest in string.gmatch(request.digests, '%S+') do
      redis.call('SET', prefix .. 'warm:' .. digest, engine, 'PX', math.ceil(warm_ttl_s * 1000))
    end
  end
  local epoch = next_epoch(tonumber(request.epoch))
  local epoch_digits = string.format('%.0f', epoch)
  local attempts = (whole(request.attempts) or 0) + 1
  local function write_event()
    return note_move(prefix, id, request.tenant, request.band, 'claimed', request.count, engine,
      '\n' .. epoch_digits .. '\n\n' .. attempts)
  end
  if charged then
    move(key, request.state, 'claimed', 'epoch', epoch_digits, 'attempts', attempts, 'engine', engine,
      'claimed_count', count, 'charged', charged, 'charged_at', time_ms, 'held_at', time_ms,
      'arrived_at', request.arrived_at, write_event())
    redis.call('HDEL', key, 'entry')
  else
    move(key, request.state, 'claimed', 'epoch', epoch_digits, 'attempts', attempts, 'engine', engine,
      'claimed_count', count, 'held_at', time_ms, write_event())
    redis.call('HDEL', key, 'suspected_at', 'line')
    local past = {open_ledger().books().read_past(request.past)}
    if past[5] >= 0 then -- its last engine died, so this one computes its tokens again
      past[3], past[4], past[5] = past[3] + 1, past[4] + count, -1
      redis.call('HSET', key, 'past', table.concat(past, ' '))
    end
  end
  redis.call('HSET', prefix .. 'claims:' .. engine, id, epoch_digits)
  local alone_until = is_suspect and count + probation_tokens(request.acquittals) or -1
  local expires_in_ms = request.deadline and tonumber(request.deadline) - time_ms or -1
  local waited_ms = math.max(0, time_ms - tonumber(request.arrived_at or time_ms))
  claimed_tokens = claimed_tokens + request_tokens
  wave[#wave + 1] = {id, request.payload, epoch, count, attempts, alone_until, request_tokens, expires_in_ms, waited_ms}
end

-- Suspects and returned requests: lists of ids that were claimed, and charged, before.

-- Remove the first id of a list that cannot run, because its record is damaged or says that it is elsewhere.
local function drop_first(line, request)
  local is_elsewhere = ENDED[request.state] or request.state == 'claimed' and holder_of(prefix, request.id)
  if not is_elsewhere then
    set_aside(prefix, request.id, {damage = 'its payload or its log cannot be read'})
  end
  if redis.call('LINDEX', prefix .. line, 0) == request.id then redis.call('LPOP', prefix .. line) end
end

-- Claim up to `most` requests of a list. Returns whether the engine now reserves its cache for one that does not fit.
local function claim_line(line, most)
  while #wave < most do
    local id = redis.call('LINDEX', prefix .. line, 0)
    if not id then return false end
    local request = read_request(id)
    local count = tonumber(request.count)
    request.payload = request.is_sound and request.line == line and read_payload(prefix, id, count)
    if not request.payload then
      drop_first(line, request)
    elseif not end_if_due(request) then
      local request_tokens = estimated_kv_tokens(request, count)
      if not fits(request_tokens) then return reserve() end
      service.count_held_time(prefix)
      redis.call('LPOP', prefix .. line)
      claim_request(request, request_tokens, nil, line == 'suspects')
    end
  end
  return false
end

-- Lanes: requests that were never claimed.

-- State of the walk through the lanes:
--   read_ahead, num_read_ahead    entries that were read and not claimed yet, in order, by lane. Each read of a lane
--                   fetches twice as many as the last one, up to LIMITS.MAX_READ_AHEAD. Code that removes an entry from
--                   its lane must remove it here too, or clear the lane's list.
--   skipped         lanes to skip for the rest of this wave, and their number
--   has_blocked     whether any tenant is over a quota
--   own_band        band from which the engine claims only requests that are warm for it; the rest is left to others for
--                   PATIENCE_MS
--   num_before, tokens_before    claims of this call before the lanes
local lanes = {read_ahead = {}, num_read_ahead = {}, skipped = {num = 0}, has_blocked = false, has_started_one = false}

local function first_read(band, tenant)
  local lane = lane_key(prefix, band, tenant)
  local entries = lanes.read_ahead[lane]
  if entries and #entries > 0 then return entries[1] end
  if queue_policy(prefix).order ~= 'fcfs' then return first_entry(prefix, band, tenant) end
  local number = 2 * (lanes.num_read_ahead[lane] or 0.5)
  number = math.min(LIMITS.MAX_READ_AHEAD, number, math.max(1, limit - #wave))
  lanes.num_read_ahead[lane], lanes.read_ahead[lane] = number, redis.call('XRANGE', lane, '-', '+', 'COUNT', number)
  return lanes.read_ahead[lane][1]
end

local function forget_read(band, tenant, entry)
  local entries = lanes.read_ahead[lane_key(prefix, band, tenant)] or {}
  for i, candidate in ipairs(entries) do
    if candidate[1] == entry then return table.remove(entries, i) end
  end
end

-- Return the request of a lane's entry, or nil if the entry is not a request's; and whether both are consistent.
local function read_entry(band, tenant, entry, content)
  local request = content[1] == 'id' and content[3] == 'request' and read_request(content[2], content[4]) or nil
  local is_sound = request and request.is_sound and request.entry == entry and request.tenant == tenant
    and request.band == band
  return request, is_sound
end

-- Park an entry that something other than the scripts wrote into a lane.
local function park_entry(lane, entry, content)
  local id = 'entry-' .. entry .. '-' .. redis.sha1hex(lane):sub(1, 8)
  redis.call('HSET', prefix .. 'parked:' .. id, 'fields', cmsgpack.pack(content), 'parked_at_ms', time_ms)
  redis.call('ZADD', prefix .. 'dead', time_ms, id)
end

-- Return the request at the head of a lane; nil if there was none that can run. One that cannot is removed.
local function read_head(band, tenant)
  local lane = lane_key(prefix, band, tenant)
  local head = first_read(band, tenant)
  if not head then
    tidy_lane(prefix, band, tenant)
    return nil
  end
  local entry, content = unpack(head)
  local request, is_sound = read_entry(band, tenant, entry, content)
  if not is_sound then
    if not request then
      park_entry(lane, entry, content)
    elseif standing_of(prefix, request.id, entry, request.state, request.entry) ~= 'stray' then
      set_aside(prefix, request.id, {tenant = tenant, band = band, entry = entry, payload = request.payload})
    end
    lanes.read_ahead[lane] = nil
    drop_entry(prefix, entry, tenant, band)
    return nil
  end
  if end_if_due(request) then
    lanes.read_ahead[lane] = nil
    return nil
  end
  return request
end

-- Requests that are warm for this engine, and which adapters it has loaded (see affinity.lua). nil if no request of the
-- model was ever marked warm, or had an adapter.
local warm, has_adapter

-- Return the request to claim from the lane of this head, and whether this engine should claim it even if others are
-- emptier: it is warm for this engine. It may overtake the head.
local function choose_from_lane(band, tenant, head)
  local is_warm = head.warm == engine
  if not is_warm and warm.num == 0 or affinity.is_too_full(claim.all, capacity()) then return head, false end
  if is_warm then return head, true end
  local lane = lane_key(prefix, band, tenant)
  local entry = affinity.pop_warm(claim, warm, lane, head.id)
  local content = entry and redis.call('XRANGE', lane, entry, entry)[1]
  if not content then return head, false end
  local request, is_sound = read_entry(band, tenant, unpack(content))
  if not is_sound then return head, false end
  if end_if_due(request) then
    forget_read(band, tenant, entry)
    return head, false
  end
  if not fits(estimated_kv_tokens(request, 0)) then return head, false end
  return request, true
end

-- Claim the request whose turn it is, and charge its tenant the expected tokens.
local function claim_from_lane(turn, band, request, request_tokens)
  local tenant, tokens = turn.tenant, request.prompt + math.min(request.most, mean_output)
  local policy = tenant_policy(prefix, tenant)
  -- Claim before updating the sums: if they are damaged, the script stops, and the request must be among the claims.
  redis.call('SET', prefix .. 'payload:' .. request.id, request.payload)
  claim_request(request, request_tokens, tokens)
  local after, clock = turn.time + tokens / policy.weight, clock_of(prefix, band)
  -- Never beyond the tenant's own time: estimates that are too high are corrected at the end and must not accumulate.
  local weight = math.max(weight_of(prefix, band), policy.weight)
  set_clock(band, math.max(turn.time, clock, math.min(after, clock + tokens / weight)))
  redis.call('ZADD', prefix .. 'ready:' .. band, after, tenant)
  if has_rate_quota(policy) then use(prefix, tenant, 1, tokens, time_ms) end
  add_to(prefix .. 'tenant:' .. tenant, 'num_started', 1)
  if not lanes.has_started_one then service.count_held_time(prefix) end
  if lanes.has_started_one then
    add_to(queue, 'num_started', 1)
  elseif redis.call('HINCRBY', queue, 'num_started', 1) == 1 then
    redis.call('HSET', queue, 'rate_at', time_ms)
  end
  lanes.has_started_one = true
  leave_lane(prefix, request.entry, tenant, band, request.prompt + request.most, request.deadline)
  forget_read(band, tenant, request.entry)
  if request.warm and warm then affinity.count_claimed(claim, warm, request) end
  tidy_lane(prefix, band, tenant, first_read(band, tenant) or false, true)
  settle_turn(prefix, turn, tokens)
end

-- Skip a lane for the rest of this wave. Returns false if too many lanes are skipped already.
local function skip_lane(band, tenant)
  if lanes.skipped.num == LIMITS.MAX_SKIPPED_LANES then return false end
  lanes.skipped[lane_key(prefix, band, tenant)], lanes.skipped.num = true, lanes.skipped.num + 1
  return true
end

-- Number of claims after which tenants that run an equal part of the engine's requests must wait.
local most_for_all = limit - (is_shared(totals.shared_at) and num_kept or 0)

-- Return the ms for which to leave a request to others that have its conversation or its adapter; nil to claim it now.
local function left_for_ms(request, request_tokens)
  return warm and affinity.left_for_conversation_ms(claim, request, request_tokens)
    or has_adapter and affinity.left_for_adapter_ms(claim, has_adapter, request, request_tokens)
    or nil
end

-- Handle the next turn. Returns false when nothing more can be claimed.
local function advance()
  local turn = next_turn(prefix, lanes.skipped)
  if not turn then return false end
  local band, tenant = queue_policy(prefix).bands[turn.level], turn.tenant
  local may_at = may_start_at(prefix, tenant)
  if may_at > 0 then
    block(prefix, tenant, may_at)
    lanes.has_blocked = true
    return true
  end
  if lanes.own_band and lanes.own_band ~= band then return false end
  if #wave >= most_for_all and has_equal_part(prefix, tenant, limit + held) then return skip_lane(band, tenant) end
  local request, is_own = read_head(band, tenant), false
  if not request then return true end
  if warm then request, is_own = choose_from_lane(band, tenant, request) end
  if end_if_over_budget(request) then
    lanes.read_ahead[lane_key(prefix, band, tenant)] = nil
    return true
  end
  local request_tokens = estimated_kv_tokens(request, 0)
  local left_ms = left_for_ms(request, request_tokens)
  if left_ms then
    retry_in(left_ms)
    if skip_lane(band, tenant) then return true end
    retry_in(LIMITS.CROWDED_MS)
    return false
  end
  is_own = is_own or has_adapter and request.adapter and affinity.has_adapter(claim, has_adapter, request.adapter)
    and not affinity.is_too_full(claim.all, capacity())
  -- Assume that waiting requests are like those of this wave, because a client's max_tokens predicts little.
  local mean_tokens = (claimed_tokens - lanes.tokens_before + request_tokens) / (#wave - lanes.num_before + 1)
  local age_ms = time_ms - request.arrived_at
  local is_patient = age_ms < affinity.PATIENCE_MS
  if not is_own and (lanes.own_band or is_patient and holds_its_part(claim.all, capacity(), mean_tokens)) then
    retry_in(math.max(1, affinity.PATIENCE_MS - age_ms))
    lanes.own_band = band
    if request.warm == engine then wake_engines(prefix, 1) end -- this engine was woken for the request but is too full
    return warm and warm.num > 0 and skip_lane(band, tenant)
  end
  if fits(request_tokens) then
    claim_from_lane(turn, band, request, request_tokens)
    return true
  end
  return not reserve() and skip_lane(band, tenant)
end

-- The steps of a claim.

redis.call('ZREM', prefix .. 'vacant', engine)
expire_due(prefix, 100, math.huge)
-- Drop this engine's reservation. It is made again below if that request still does not fit.
if redis.call('GET', prefix .. 'reserved') == engine then redis.call('DEL', prefix .. 'reserved') end

-- A suspect (a request whose engine died) runs alone, so it needs an idle engine. If none becomes idle, one engine, the
-- ward, gets no new requests until it has drained.
local suspect = redis.call('LINDEX', prefix .. 'suspects', 0)
if suspect and limit > 0 and held == 0 then
  claim_line('suspects', 1)
  if #wave > 0 then return reply(false) end
  -- Those that could not be resumed have ended.
  suspect = redis.call('LINDEX', prefix .. 'suspects', 0)
end
if suspect and limit > 0 then
  local since = whole(fields_of(prefix .. 'request:' .. suspect, 'suspected_at').suspected_at) or time_ms
  if redis.call('PTTL', prefix .. 'ward') > LIMITS.WARD_TTL_MS then redis.call('DEL', prefix .. 'ward') end
  if marks.has_passed(since, LIMITS.WARD_AFTER_MS) then
    redis.call('SET', prefix .. 'ward', engine, 'NX', 'PX', LIMITS.WARD_TTL_MS)
  end
  if redis.call('GET', prefix .. 'ward') == engine then
    redis.call('PEXPIRE', prefix .. 'ward', LIMITS.WARD_TTL_MS)
    is_saving = 1
    return reply(false)
  end
end

if claim_line('returned', limit) then return reply(true) end

local function next_unblock_at() return redis.call('ZRANGE', prefix .. 'blocked', 0, 0, 'WITHSCORES')[2] end
local unblock_at = next_unblock_at()
lanes.has_blocked = unblock_at ~= nil
if unblock_at and tonumber(unblock_at) <= time_ms then
  for _, tenant in ipairs(redis.call('ZRANGEBYSCORE', prefix .. 'blocked', '-inf', time_ms, 'LIMIT', 0, 100)) do
    unblock(prefix, tenant)
  end
end

warm, has_adapter = totals.warm and affinity.read_warm(claim), totals.adapters and {}
claim.all = capacity_of_all(prefix, engine, capacity())
lanes.num_before, lanes.tokens_before = #wave, claimed_tokens
-- Count claimed requests even if a later one meets foreign data and stops the script.
local is_done, failure = pcall(function()
  local num_turns = 0
  while #wave < limit and advance() do
    num_turns = num_turns + 1
    if num_turns == limit + LIMITS.MAX_TURNS then return retry_in(0) end
  end
end)
write_counts()
write_clocks(prefix)
if not is_done then error(failure, 0) end

unblock_at = lanes.has_blocked and next_unblock_at()
if unblock_at and unblock_at ~= 'inf' then retry_in(math.max(1, tonumber(unblock_at) - time_ms)) end
return reply(true)
