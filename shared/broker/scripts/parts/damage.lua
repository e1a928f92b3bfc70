-- uses: lanes
-- Damaged records: something other than the scripts has written to them or deleted them. How to detect damage, and how
-- to mend a record enough to end its request.
--
-- A script checks what it will use before it writes anything. It parks a damaged request (set_aside in life.lua): the
-- caller gets the error, and the rest of the queue continues. A request can only be ended if its record is complete, so
-- mend_request completes it from other keys. None of this costs anything while records are intact.

local LOST_TTL_MS = 3600000
-- A tenant of no one: the counts of a real tenant must not decrease for a request that may not be its own.
local LOST_TENANT = 'unknown'

local LINES = {returned = true, suspects = true}

local function is_entry(value) return value and string.find(value, '^%d+%-%d+$') ~= nil end

-- Return all engines that may hold claims. A lease or a capacity may be lost, but not both at once.
local function engines_of(prefix)
  local engines, is_known = attempt('ZRANGE', prefix .. 'leases', 0, -1) or {}, {}
  for _, engine in ipairs(engines) do is_known[engine] = true end
  for _, engine in ipairs(attempt('HKEYS', prefix .. 'rooms') or {}) do
    if not is_known[engine] then engines[#engines + 1] = engine end
  end
  return engines
end

-- Return the engine that has claimed a request; nil if none has.
local function holder_of(prefix, id)
  for _, engine in ipairs(engines_of(prefix)) do
    if attempt('HEXISTS', prefix .. 'claims:' .. engine, id) == 1 then return engine end
  end
end

local function line_of(prefix, id)
  for _, line in ipairs({'returned', 'suspects'}) do
    if attempt('LPOS', prefix .. line, id) then return line end
  end
end

-- Whether a request without a readable record is stored elsewhere.
local function is_somewhere(prefix, id)
  return redis.call('EXISTS', prefix .. 'request:' .. id, prefix .. 'payload:' .. id) > 0
    or holder_of(prefix, id) ~= nil or line_of(prefix, id) ~= nil
end

-- Return the number of output tokens in a request's log; nil if the log cannot be decoded.
local function logged_count(prefix, id)
  local last = attempt('LINDEX', prefix .. 'log:' .. id, -1)
  if not last then return last == false and 0 or nil end
  -- A Delta is an array of version, index, token_ids and more, some of it bytes, which cmsgpack does not read.
  local head = string.byte(last) or 0
  local offset = head >= 0x93 and head <= 0x9f and 1 or head == 0xdc and 3
  if not offset then return nil end
  local is_read, _, _, index, token_ids = pcall(cmsgpack.unpack_limit, last, 3, offset)
  return is_read and type(index) == 'number' and type(token_ids) == 'table' and index + #token_ids or nil
end

-- Return the payload of a request that was claimed before, with count tokens logged; nil if it is lost.
local function read_payload(prefix, id, count)
  local payload = attempt('GET', prefix .. 'payload:' .. id)
  return payload and logged_count(prefix, id) == count and payload or nil
end

-- Return the tokens that a request without a readable size counts for in its lane: the mean of the lane.
local function mean_tokens(prefix, tenant, band)
  write_counts(prefix .. 'tenant:' .. tenant)
  local sums = fields_of(prefix .. 'tenant:' .. tenant, 'depth:' .. band, 'tokens:' .. band)
  local depth = whole(sums['depth:' .. band]) or 0
  return depth > 0 and math.floor((whole(sums['tokens:' .. band]) or 0) / depth) or 0
end

local OPTIONAL = {'claimed_count', 'deaths', 'acquittals', 'arrived_at', 'suspected_at', 'segments', 'input_bytes',
  'number', 'webhook_n', 'chunks'}

-- Complete the record of a request, if it is damaged. own has the facts that the caller knows: tenant, band and entry
-- of its lane, or its engine. Returns a description of the damage, '' if there is none.
local function mend_request(prefix, id, own)
  local key, request, damage = prefix .. 'request:' .. id, {}, {}
  own = own or {}
  local types = {request = 'hash', log = 'list', input = 'list', payload = 'string', parked = 'hash'}
  for kind, right_type in pairs(types) do
    local key_type = redis.call('TYPE', prefix .. kind .. ':' .. id).ok
    if key_type ~= 'none' and key_type ~= right_type then
      redis.call('DEL', prefix .. kind .. ':' .. id)
      damage[#damage + 1] = kind .. ' is a ' .. key_type
    end
  end
  local flat = redis.call('HGETALL', key)
  for i = 1, #flat, 2 do request[flat[i]] = flat[i + 1] end
  if #flat == 0 and #damage == 0 then damage[1] = 'it was deleted' end

  -- Correct a field unless it is right; a value of nil removes it.
  local function mend(field, is_right, value)
    if is_right then return end
    if #flat > 0 then
      local says = request[field] and ' is "' .. string.gsub(string.sub(request[field], 1, 40), '[^\32-\126]', '?') .. '"'
      damage[#damage + 1] = field .. (says or ' is missing')
    end
    if value == nil then redis.call('HDEL', key, field) else redis.call('HSET', key, field, value) end
    request[field] = value ~= nil and tostring(value) or nil
  end

  for _, field in ipairs(OPTIONAL) do mend(field, not request[field] or whole(request[field])) end
  local engine, line = own.engine or holder_of(prefix, id), line_of(prefix, id)
  local where = engine and 'claimed' or (line or own.entry) and 'queued' or request.ending and 'awaiting_input'
  mend('state', where and request.state == where or not where and MOVES[request.state], where or 'queued')
  if engine then mend('engine', request.engine == engine, engine) end
  mend('line', request.line == line, line)
  mend('tenant', own.tenant and request.tenant == own.tenant or not own.tenant and request.tenant and request.tenant ~= '',
    own.tenant or LOST_TENANT)
  mend('band', own.band and request.band == own.band or not own.band and request.band and request.band ~= '',
    own.band or queue_policy(prefix).default_band)
  local entry = own.entry
  if not entry and is_entry(request.entry) then
    local in_lane = attempt('XRANGE', lane_key(prefix, request.band, request.tenant), request.entry, request.entry)
    entry = in_lane and in_lane[1] and request.entry
  end
  mend('entry', request.entry == (entry or nil), entry or nil)

  local logged = logged_count(prefix, id)
  local count = logged or whole(request.count) or 0
  mend('count', whole(request.count) == count, count)
  -- If it is lost, use one higher than any before: writes of an engine with an old epoch must stay refused.
  mend('epoch', whole(request.epoch), next_epoch())
  mend('attempts', not request.attempts or whole(request.attempts), engine and 1 or 0)
  mend('ttl', whole(request.ttl), LOST_TTL_MS)
  local mean = entry and mean_tokens(prefix, request.tenant, request.band) or 0
  mend('prompt', whole(request.prompt), math.max(0, mean - (whole(request.max) or 0)))
  mend('max', whole(request.max), math.max(0, mean - tonumber(request.prompt)))
  if not entry then
    mend('charged', whole(request.charged), tonumber(request.prompt) + count)
    mend('charged_at', whole(request.charged_at), now_ms())
  end
  local due = attempt('ZSCORE', prefix .. 'deadlines', id)
  mend('deadline', request.deadline and whole(request.deadline) or not request.deadline and not due, due or nil)
  if attempt('SISMEMBER', prefix .. 'fail_fast', id) == 1 then mend('fail_fast', request.fail_fast, 1) end
  local num_more = redis.call('LLEN', prefix .. 'input:' .. id)
  if num_more > 0 then mend('chunks', request.chunks, num_more + 1) end
  if request.webhook_of and not request.webhook_n then mend('webhook_of', false) end
  return string.sub(table.concat(damage, ', '), 1, 400)
end

-- Say how a lane's entry relates to the record of its request: "its" own entry; "lost": the record is missing, or does
-- not say where the request is; or a "stray" entry of an id that was used again. state and own_entry may be passed if
-- they were read.
local function standing_of(prefix, id, entry, state, own_entry)
  if not own_entry then
    local request = fields_of(prefix .. 'request:' .. id, 'state', 'entry', 'line')
    state, own_entry = request.state, request.entry
    if request.line and not own_entry then return 'stray' end
  end
  if own_entry == entry then return ENDED[state] and 'stray' or 'its' end
  if MOVES[state] and state ~= 'queued' then return 'stray' end
  if not is_entry(own_entry) then return 'lost' end
  local request = fields_of(prefix .. 'request:' .. id, 'band', 'tenant')
  local in_lane = request.band and request.tenant
    and attempt('XRANGE', lane_key(prefix, request.band, request.tenant), own_entry, own_entry)
  return in_lane and in_lane[1] and 'stray' or 'lost'
end
