-- Hand a wave of requests to an engine, as many as it can admit now, and renew its lease.
-- KEYS: leases. ARGV: prefix, engine, lease_ttl_ms, limit, held, kv_tokens, held_kv_tokens, kept.
-- limit is how many more sequences it takes beside the ones it holds, kv_tokens what its cache holds in all, of which
-- held_kv_tokens are spoken for; kept is how many of its sequences are for tenants that have few.
-- Each claim gives the request another epoch, which fences every later write.
-- Returns {wave, retry_ms, is_saving}. A wave is a list of {id, payload, epoch, count, attempts, alone_until, kv_tokens,
-- expires_in_ms, waited_ms}. alone_until is -1, or the number of output tokens before which the engine is to take no
-- other request: this one may have killed its last engine. kv_tokens is what it is reckoned to take of the cache;
-- expires_in_ms is -1 without a deadline; waited_ms is the time since it entered its lane. retry_ms says when more may
-- be had without a wake, 0 if this claim has only looked at a part of what waits; -1 if nothing is known of. is_saving is
-- 1 if the engine is to take nothing elsewhere either: it empties itself for a suspect, or keeps its cache for a large one.
local prefix, engine, limit, held = ARGV[1], ARGV[2], tonumber(ARGV[4]), tonumber(ARGV[5])
local kv_tokens, held_kv_tokens = tonumber(ARGV[6]), tonumber(ARGV[7])
local now, queue = now_ms(), prefix .. 'queue'
local wave, retry_ms, num_taken, taken_tokens, is_saving = {}, -1, 0, 0, 0
local WARD_AFTER_MS, WARD_TTL_MS = 2000, 10000
-- How long an engine leaves a request to others that have more room, and the cache kept for one that does not fit yet.
local PATIENCE_MS, RESERVED_TTL_MS = 100, 10000
local MAX_SKIPPED_LANES, MAX_LOOKS = 8, 200
-- Who finds no end of lanes that are left to others comes back soon: they are for the moment only that a wake takes.
local CROWDED_MS = 10
-- Expected of a model that has not ended a request yet.
local OUTPUT_TOKENS = 256
gather_counts()
marks.set_lease(prefix, 'leases', engine, tonumber(ARGV[3]))

local totals = fields(queue, 'paused', 'mean_output', 'shared_at', 'warm', 'adapters')
if totals.paused then return {wave, retry_ms, is_saving} end
local mean_output = math.ceil(amount(totals.mean_output or OUTPUT_TOKENS))

local num_kept = tonumber(ARGV[8])
local most_for_all = limit - (is_shared(totals.shared_at) and num_kept or 0)

local function retry_in(ms)
  if retry_ms < 0 or ms < retry_ms then retry_ms = ms end
end

-- What a request will take of the cache, reckoned to half of the output that is to be expected: so the cache is full
-- on the average, and hardly ever over-full.
local function reckoned_kv_tokens(prompt, most, count)
  local rest = math.max(1, math.min(most, mean_output) - count)
  return math.min(kv_tokens, prompt + count + math.ceil(rest / 2))
end

local function fits(wanted)
  return held + num_taken == 0 or held_kv_tokens + taken_tokens + wanted <= kv_tokens
end

-- An engine that has no room for the next request in order takes nothing behind it, so that it will have. One engine
-- does at a time; the others pass the lane by. Returns whether it is this one.
local function reserve()
  local holder = redis.call('GET', prefix .. 'reserved')
  if holder and holder ~= engine and redis.call('PTTL', prefix .. 'reserved') <= RESERVED_TTL_MS then return false end
  redis.call('SET', prefix .. 'reserved', engine, 'PX', RESERVED_TTL_MS)
  is_saving = 1
  return true
end

-- charged is what its tenant is charged for it, at its first claim; nil at later ones.
local function take(id, payload, request, wanted, charged, is_suspect)
  local key, count = prefix .. 'request:' .. id, tonumber(request.count)
  local warm_ttl_s = request.digests and queue_policy(prefix).warm_ttl_s or cjson.null
  if warm_ttl_s ~= cjson.null then -- what goes on from here is to come to this engine
    for digest in string.gmatch(request.digests, '%S+') do
      redis.call('SET', prefix .. 'warm:' .. digest, engine, 'PX', math.ceil(warm_ttl_s * 1000))
    end
  end
  local epoch = next_epoch(tonumber(request.epoch))
  local epoch_digits = string.format('%.0f', epoch)
  local attempts = (whole(request.attempts) or 0) + 1
  local function note()
    return note_move(prefix, id, request.tenant, request.band, 'claimed', request.count, engine,
      '\n' .. epoch_digits .. '\n\n' .. attempts)
  end
  if charged then
    move(key, request.state, 'claimed', 'epoch', epoch_digits, 'attempts', attempts, 'engine', engine, 'claimed_count', count,
      'charged', charged, 'charged_at', now, 'held_at', now, 'arrived_at', request.arrived_at, note())
    redis.call('HDEL', key, 'entry')
  else
    move(key, request.state, 'claimed', 'epoch', epoch_digits, 'attempts', attempts, 'engine', engine, 'claimed_count', count,
      'held_at', now, note())
    redis.call('HDEL', key, 'suspected_at', 'line')
  end
  redis.call('HSET', prefix .. 'claims:' .. engine, id, epoch_digits)
  local alone_until = is_suspect and count + probation_tokens(request.acquittals) or -1
  local expires_in_ms = request.deadline and tonumber(request.deadline) - now or -1
  num_taken, taken_tokens = num_taken + 1, taken_tokens + wanted
  local waited_ms = math.max(0, now - tonumber(request.arrived_at or now))
  wave[num_taken] = {id, payload, epoch, count, attempts, alone_until, wanted, expires_in_ms, waited_ms}
end

local function read_request(id)
  local request = fields_of(prefix .. 'request:' .. id, 'state', 'count', 'prompt', 'max', 'deadline', 'acquittals',
    'entry', 'arrived_at', 'epoch', 'attempts', 'tenant', 'band', 'line', 'digests', 'warm', 'adapter')
  local prompt, most = whole(request.prompt), whole(request.max)
  request.is_sound = prompt and most and whole(request.count) and whole(request.epoch)
    and (not request.attempts or whole(request.attempts)) and (not request.deadline or whole(request.deadline))
    and request.state == 'queued' and request.tenant and request.band
  request.prompt, request.most = prompt, most
  request.arrived_at = request.entry and arrival_ms(prefix, request.entry, id) or whole(request.arrived_at)
  return request
end

-- The look at the deadlines below ends so many at most; what comes to its turn after them is ended here.
local function end_if_due(id, request)
  local is_due = request.deadline and tonumber(request.deadline) <= now
  if is_due then stop_request(prefix, id, 'expired') end
  return is_due
end

-- What is first in a line cannot be run: its record is damaged, or says that it is elsewhere.
local function drop_from(line, id, request)
  local is_elsewhere = ENDED[request.state] or request.state == 'claimed' and holder_of(prefix, id)
  if not is_elsewhere then
    set_aside(prefix, id, {damage = 'its payload or its log does not read'})
  end
  if redis.call('LINDEX', prefix .. line, 0) == id then redis.call('LPOP', prefix .. line) end
end

-- Take requests that were claimed before, of a line of ids; their tenants were charged then.
local function take_from(line, most)
  while num_taken < most do
    local id = redis.call('LINDEX', prefix .. line, 0)
    if not id then return end
    local request = read_request(id)
    local payload = request.is_sound and request.line == line and read_payload(prefix, id, tonumber(request.count))
    if not payload then
      drop_from(line, id, request)
    elseif not end_if_due(id, request) then
      local wanted = reckoned_kv_tokens(request.prompt, request.most, tonumber(request.count))
      if not fits(wanted) then return reserve() end
      service.note_under_way(prefix)
      redis.call('LPOP', prefix .. line)
      take(id, payload, request, wanted, nil, line == 'suspects')
    end
  end
end

-- What the engine holds now, for the others that come after it: sequences in all, held, tokens in all, held.
local function room()
  return {seqs = limit + held, held_seqs = held + num_taken, tokens = kv_tokens,
    held_tokens = held_kv_tokens + taken_tokens}
end

-- takes_more: whether it is to be told of what comes. One that runs a suspect, or empties itself for one, is not.
local function reply(takes_more)
  write_counts()
  note_heads(prefix)
  set_room(prefix, engine, room())
  if takes_more and num_taken < limit then set_vacant(prefix, engine, room(), num_kept) end
  return {wave, retry_ms, is_saving}
end

redis.call('ZREM', prefix .. 'vacant', engine)
expire_due(prefix, 100, math.huge)
-- What this engine keeps its cache for is found again below, if it still does not fit.
if redis.call('GET', prefix .. 'reserved') == engine then redis.call('DEL', prefix .. 'reserved') end

-- Suspects run alone, so they go to an engine that holds nothing. Where none ever does, one engine, the ward, is given
-- nothing new until it has emptied itself.
local suspect = redis.call('LINDEX', prefix .. 'suspects', 0)
if suspect and limit > 0 then
  if held == 0 then
    take_from('suspects', 1)
    if num_taken > 0 then return reply(false) end
  end
  local since = whole(fields_of(prefix .. 'request:' .. suspect, 'suspected_at').suspected_at) or now
  if redis.call('PTTL', prefix .. 'ward') > WARD_TTL_MS then redis.call('DEL', prefix .. 'ward') end
  if marks.has_passed(since, WARD_AFTER_MS) then redis.call('SET', prefix .. 'ward', engine, 'NX', 'PX', WARD_TTL_MS) end
  if redis.call('GET', prefix .. 'ward') == engine then
    redis.call('PEXPIRE', prefix .. 'ward', WARD_TTL_MS)
    is_saving = 1
    return reply(false)
  end
end

if take_from('returned', limit) then return reply(true) end

local has_blocked = redis.call('ZRANGE', prefix .. 'blocked', 0, 0, 'WITHSCORES')[2]
if has_blocked and tonumber(has_blocked) <= now then
  for _, tenant in ipairs(redis.call('ZRANGEBYSCORE', prefix .. 'blocked', '-inf', now, 'LIMIT', 0, 100)) do
    unblock(prefix, tenant)
  end
end

-- A lane's entry as id, payload and hash of its request, and whether all of them are as they should be.
local function read_entry(band, tenant, entry, content)
  local id, payload = content[2], content[4]
  local request = content[1] == 'id' and content[3] == 'request' and read_request(id)
  local is_sound = request and request.is_sound and request.entry == entry and request.tenant == tenant
    and request.band == band
  return id, payload, request, is_sound
end

-- Entries of lanes that were read and not taken yet, in order: the more of a lane are taken, the more are read at once. Who
-- takes an entry away takes it out of here, or forgets the lane.
local read_ahead, num_read_ahead = {}, {}
local MAX_READ_AHEAD = 16

local function first_of(band, tenant)
  local lane = lane_key(prefix, band, tenant)
  local entries = read_ahead[lane]
  if entries and #entries > 0 then return entries[1] end
  if queue_policy(prefix).order ~= 'fcfs' then return first_entry(prefix, band, tenant) end
  num_read_ahead[lane] = math.min(MAX_READ_AHEAD, 2 * (num_read_ahead[lane] or 0.5), math.max(1, limit - num_taken))
  read_ahead[lane] = redis.call('XRANGE', lane, '-', '+', 'COUNT', num_read_ahead[lane])
  return read_ahead[lane][1]
end

local function forget_entry(band, tenant, entry)
  local entries = read_ahead[lane_key(prefix, band, tenant)] or {}
  for i, of in ipairs(entries) do
    if of[1] == entry then return table.remove(entries, i) end
  end
end
