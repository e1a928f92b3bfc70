-- Records that others than scripts have written to or deleted: how they are known, and made whole enough to be ended.
--
-- A script checks what it is about to use before it writes anything. What is damaged is set aside (life.lua): its caller
-- gets the error, and what else waits goes on. To end a request its record must be whole, so mend_request makes it so,
-- from what is known of it elsewhere. All this costs nothing while records are sound.

local LOST_TTL_MS = 3600000
-- Nobody's: what is counted of requests must not be taken off a tenant that did not have this one.
local LOST_TENANT = 'unknown'

local LINES = {returned = true, suspects = true}

local function is_entry(value) return value and string.find(value, '^%d+%-%d+$') ~= nil end

-- All that may hold claims: a lease or a room may be lost, not both at once.
local function engines_of(prefix)
  local engines, is_known = attempt('ZRANGE', prefix .. 'leases', 0, -1) or {}, {}
  for _, engine in ipairs(engines) do is_known[engine] = true end
  for _, engine in ipairs(attempt('HKEYS', prefix .. 'rooms') or {}) do
    if not is_known[engine] then engines[#engines + 1] = engine end
  end
  return engines
end

-- The engine whose claims a request is among.
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

-- Whether a request without a readable record is known all the same.
local function is_somewhere(prefix, id)
  return redis.call('EXISTS', prefix .. 'request:' .. id, prefix .. 'payload:' .. id) > 0
    or holder_of(prefix, id) ~= nil or line_of(prefix, id) ~= nil
end

-- Output tokens that a request's log holds; nil if it does not read.
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

-- What an engine needs of a request that was claimed before, with count tokens logged; nil if it is gone.
local function read_payload(prefix, id, count)
  local payload = attempt('GET', prefix .. 'payload:' .. id)
  return payload and logged_count(prefix, id) == count and payload or nil
end

-- Tokens that a request counts for in its lane, where its own record does not say: as the others there.
local function mean_tokens(prefix, tenant, band)
  write_counts(prefix .. 'tenant:' .. tenant)
  local of = fields_of(prefix .. 'tenant:' .. tenant, 'depth:' .. band, 'tokens:' .. band)
  local depth = whole(of['depth:' .. band]) or 0
  return depth > 0 and math.floor((whole(of['tokens:' .. band]) or 0) / depth) or 0
end

local OPTIONAL = {'claimed_count', 'deaths', 'acquittals', 'arrived_at', 'suspected_at', 'segments', 'input_bytes',
  'number', 'webhook_n', 'chunks'}

-- Make the record of a request whole, if it is not. own is what is known of where it stands: tenant, band and entry of its
-- lane, or its engine. Returns what was wrong with it.
local function mend_request(prefix, id, own)
  local key, now, found = prefix .. 'request:' .. id, {}, {}
  own = own or {}
  for kind, wanted in pairs({request = 'hash', log = 'list', input = 'list', payload = 'string', parked = 'hash'}) do
    local is = redis.call('TYPE', prefix .. kind .. ':' .. id).ok
    if is ~= 'none' and is ~= wanted then
      redis.call('DEL', prefix .. kind .. ':' .. id)
      found[#found + 1] = kind .. ' is a ' .. is
    end
  end
  local flat = redis.call('HGETALL', key)
  for i = 1, #flat, 2 do now[flat[i]] = flat[i + 1] end
  if #flat == 0 and #found == 0 then found[1] = 'it was deleted' end

  -- A field that is right as it is keeps what it says; a value of nil takes it away.
  local function mend(field, is_right, value)
    if is_right then return end
    if #flat > 0 then
      local says = now[field] and ' is "' .. string.gsub(string.sub(now[field], 1, 40), '[^\32-\126]', '?') .. '"'
      found[#found + 1] = field .. (says or ' is missing')
    end
    if value == nil then redis.call('HDEL', key, field) else redis.call('HSET', key, field, value) end
    now[field] = value ~= nil and tostring(value) or nil
  end

  for _, field in ipairs(OPTIONAL) do mend(field, not now[field] or whole(now[field])) end
  local engine, line = own.engine or holder_of(prefix, id), line_of(prefix, id)
  local where = engine and 'claimed' or (line or own.entry) and 'queued' or now.ending and 'awaiting_input'
  mend('state', where and now.state == where or not where and MOVES[now.state], where or 'queued')
  if engine then mend('engine', now.engine == engine, engine) end
  mend('line', now.line == line, line)
  mend('tenant', own.tenant and now.tenant == own.tenant or not own.tenant and now.tenant and now.tenant ~= '',
    own.tenant or LOST_TENANT)
  mend('band', own.band and now.band == own.band or not own.band and now.band and now.band ~= '',
    own.band or queue_policy(prefix).default_band)
  local entry = own.entry
  if not entry and is_entry(now.entry) then
    local there = attempt('XRANGE', lane_key(prefix, now.band, now.tenant), now.entry, now.entry)
    entry = there and there[1] and now.entry
  end
  mend('entry', now.entry == (entry or nil), entry or nil)

  local logged = logged_count(prefix, id)
  local count = logged or whole(now.count) or 0
  mend('count', whole(now.count) == count, count)
  -- Higher than any that was given out, should it be lost: what an engine still writes must stay refused.
  mend('epoch', whole(now.epoch), next_epoch())
  mend('attempts', not now.attempts or whole(now.attempts), engine and 1 or 0)
  mend('ttl', whole(now.ttl), LOST_TTL_MS)
  local mean = entry and mean_tokens(prefix, now.tenant, now.band) or 0
  mend('prompt', whole(now.prompt), math.max(0, mean - (whole(now.max) or 0)))
  mend('max', whole(now.max), math.max(0, mean - tonumber(now.prompt)))
  if not entry then
    mend('charged', whole(now.charged), tonumber(now.prompt) + count)
    mend('charged_at', whole(now.charged_at), now_ms())
  end
  local due = attempt('ZSCORE', prefix .. 'deadlines', id)
  mend('deadline', now.deadline and whole(now.deadline) or not now.deadline and not due, due or nil)
  if attempt('SISMEMBER', prefix .. 'fail_fast', id) == 1 then mend('fail_fast', now.fail_fast, 1) end
  local num_more = redis.call('LLEN', prefix .. 'input:' .. id)
  if num_more > 0 then mend('chunks', now.chunks, num_more + 1) end
  if now.webhook_of and not now.webhook_n then mend('webhook_of', false) end
  return string.sub(table.concat(found, ', '), 1, 400)
end

-- Whose a lane's entry is by the record of its request, state and entry of which may be handed in: "its" own, that of a
-- request that was "lost" (its record is gone, or says nothing of where it is), or a "stray" of an id that is used anew.
local function standing_of(prefix, id, entry, state, own_entry)
  if not own_entry then
    local now = fields_of(prefix .. 'request:' .. id, 'state', 'entry', 'line')
    state, own_entry = now.state, now.entry
    if now.line and not own_entry then return 'stray' end
  end
  if own_entry == entry then return ENDED[state] and 'stray' or 'its' end
  if MOVES[state] and state ~= 'queued' then return 'stray' end
  if not is_entry(own_entry) then return 'lost' end
  local now = fields_of(prefix .. 'request:' .. id, 'band', 'tenant')
  local there = now.band and now.tenant
    and attempt('XRANGE', lane_key(prefix, now.band, now.tenant), own_entry, own_entry)
  return there and there[1] and 'stray' or 'lost'
end
