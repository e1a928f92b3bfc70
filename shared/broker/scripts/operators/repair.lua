-- Put right what all requests of a model share, where others than scripts have written to it. KEYS: leases. ARGV: prefix.
-- Called when another script has failed, which may have stopped half-way; so everything is counted anew. What cannot be
-- read is taken away: it is written again as it is needed. Returns a list of what was wrong.
local prefix, found = ARGV[1], {}
local queue = prefix .. 'queue'
local LOST_LEASE_MS = 10000

local function keep_type(name, wanted)
  local is = redis.call('TYPE', prefix .. name).ok
  if is == 'none' or is == wanted then return end
  redis.call('DEL', prefix .. name)
  found[#found + 1] = name .. ' was a ' .. is
end

local function is_number(value) return string.find(value, '^%-?%d') and pcall(amount, value) end
local function is_amount(value) return is_number(value) and tonumber(value) >= 0 end
local function is_integer(value) return #value < 16 and string.find(value, '^%-?%d+$') end
local function is_count(value) return whole(value) end
local function is_rate(value) return not string.find(value, '[^%d.e+ -]') end

-- Keep of a hash the fields whose value is right; check is by the beginning of a field's name, or of all.
local function keep_fields(name, check_of)
  keep_type(name, 'hash')
  local flat, is_whole = redis.call('HGETALL', prefix .. name), true
  for i = 1, #flat, 2 do
    local check = type(check_of) == 'function' and check_of or check_of[string.match(flat[i], '^[a-z_]+')] or is_amount
    if not check(flat[i + 1]) then
      redis.call('HDEL', prefix .. name, flat[i])
      found[#found + 1], is_whole = name .. ': ' .. flat[i], false
    end
  end
  return is_whole
end

local function is_limit(value) return value == nil or value == cjson.null or type(value) == 'number' and value > 0 end

local function is_tenant_policy(of)
  return type(of) == 'table' and (of.weight == nil or type(of.weight) == 'number' and of.weight > 0)
    and is_limit(of.requests_per_minute) and is_limit(of.tokens_per_minute) and is_limit(of.max_concurrent_requests)
    and is_limit(of.max_queue_depth) and is_limit(of.max_queue_tokens)
end

local function is_policy(of)
  if type(of) ~= 'table' or type(of.bands or {}) ~= 'table' then return false end
  local has_default = of.bands == nil
  for _, band in ipairs(of.bands or {}) do
    if type(band) ~= 'string' then return false end
    has_default = has_default or band == of.default_band
  end
  local strictness = of.strictness or 1
  return has_default and type(strictness) == 'number' and strictness > 0 and strictness <= 1
    and (of.ageing_s == nil or of.ageing_s == cjson.null or type(of.ageing_s) == 'number')
    and is_limit(of.warm_ttl_s) and (of.affinity_ms == nil or type(of.affinity_ms) == 'number')
    and (of.events_kept == nil or type(of.events_kept) == 'number')
    and is_limit(of.max_queue_depth) and is_limit(of.max_queue_tokens) and (of.tenant == nil or is_tenant_policy(of.tenant))
end

local function decodes(data, check)
  local is_json, value = pcall(cjson.decode, data)
  return is_json and check(value)
end

local function repair_policies()
  local own = redis.call('GET', prefix .. 'policy')
  if own and not decodes(own, is_policy) then
    redis.call('DEL', prefix .. 'policy')
    found[#found + 1] = 'policy'
  end
  keep_fields('tenants', function(data) return decodes(data, is_tenant_policy) end)
end

-- Every tenant that anything is known of.
local function all_tenants()
  local tenants = {}
  local function add(names)
    for _, name in ipairs(names) do tenants[name] = true end
  end
  add(redis.call('SMEMBERS', prefix .. 'active'))
  add(redis.call('ZRANGE', prefix .. 'blocked', 0, -1))
  add(redis.call('HKEYS', prefix .. 'tenants'))
  for _, band in ipairs(queue_policy(prefix).bands) do
    for _, kind in ipairs({'ready:', 'heads:', 'idle:'}) do add(redis.call('ZRANGE', prefix .. kind .. band, 0, -1)) end
  end
  return tenants
end

local function repair_engines()
  for _, engine in ipairs(engines_of(prefix)) do
    -- One that is dead must be found by a reaper.
    redis.call('ZADD', prefix .. 'leases', 'NX', now_ms() + LOST_LEASE_MS, engine)
    local name = 'claims:' .. engine
    keep_type(name, 'hash')
    keep_type('warm_for:' .. engine, 'zset')
    local claims = redis.call('HGETALL', prefix .. name)
    for i = 1, #claims, 2 do
      if not whole(claims[i + 1]) then
        local epoch = whole(fields_of(prefix .. 'request:' .. claims[i], 'epoch').epoch) or 0
        redis.call('HSET', prefix .. name, claims[i], epoch)
        found[#found + 1] = name .. ': ' .. claims[i]
      end
    end
  end
  for _, client in ipairs(redis.call('ZRANGE', prefix .. 'clients', 0, -1)) do keep_type('client:' .. client, 'set') end
end

-- Tokens of what waits in a lane, by its records; of the first so many, since a script holds up the server.
local MAX_WALKED = 10000
local function tokens_of(lane)
  local tokens = 0
  for _, entry in ipairs(redis.call('XRANGE', lane, '-', '+', 'COUNT', MAX_WALKED)) do
    local now = fields_of(prefix .. 'request:' .. tostring(entry[2][2]), 'prompt', 'max')
    tokens = tokens + (whole(now.prompt) or 0) + (whole(now.max) or 0)
  end
  return tokens
end

local function repair_lane(tenant, band, is_blocked)
  keep_type('lane:' .. band .. ':' .. tenant, 'stream')
  keep_type('due:' .. band .. ':' .. tenant, 'zset')
  local depth = redis.call('XLEN', lane_key(prefix, band, tenant))
  local counted = fields(prefix .. 'tenant:' .. tenant, 'depth:' .. band, 'tokens:' .. band)
  local tokens = whole(counted['depth:' .. band]) == depth and whole(counted['tokens:' .. band])
  if not tokens then tokens = tokens_of(lane_key(prefix, band, tenant)) end
  redis.call('HSET', prefix .. 'tenant:' .. tenant, 'depth:' .. band, depth, 'tokens:' .. band, depth > 0 and tokens or 0)
  local head = first_entry(prefix, band, tenant) or redis.call('XRANGE', lane_key(prefix, band, tenant), '-', '+', 'COUNT', 1)[1]
  if not head then
    shut_lane(prefix, band, tenant)
  elseif not is_blocked then
    open_lane(prefix, band, tenant, arrival_ms(prefix, head[1], head[2][2]))
  end
  if head then redis.call('SADD', prefix .. 'active', tenant) end
end

local function repair_tenants()
  local sums = {}
  for tenant in pairs(all_tenants()) do
    local owner = 'tenant:' .. tenant
    keep_fields(owner, {depth = is_count, tokens = is_integer, entered = is_count, num_started = is_count})
    if not keep_fields('usage:' .. tenant, is_count) then redis.call('DEL', prefix .. 'usage:' .. tenant) end
    local is_blocked = redis.call('ZSCORE', prefix .. 'blocked', tenant)
    for _, band in ipairs(queue_policy(prefix).bands) do
      repair_lane(tenant, band, is_blocked)
      for _, kind in ipairs({'depth:', 'tokens:', 'weight:'}) do
        local field = kind .. band
        sums[field] = (sums[field] or 0) + tonumber(redis.call('HGET', prefix .. owner, field) or 0)
      end
    end
  end
  for _, band in ipairs(queue_policy(prefix).bands) do
    for _, field in ipairs({'depth:', 'tokens:', 'weight:'}) do
      redis.call('HSET', queue, field .. band, sums[field .. band] or 0)
    end
  end
end

for name, wanted in pairs({policy = 'string', active = 'set', returned = 'list', suspects = 'list', leases = 'zset',
  clients = 'zset', deadlines = 'zset', fail_fast = 'set', dead = 'zset', reserved = 'string', ward = 'string',
  blocked = 'zset', vacant = 'zset', outbox = 'stream', events = 'stream', layout = 'string'}) do
  keep_type(name, wanted)
end
keep_fields('queue', {credit = is_number, depth = is_integer, tokens = is_integer, num_started = is_count,
  num_awaiting = is_count, ended = is_count, ended_seen = is_count, entered = is_count, rate = is_rate})
keep_fields('rooms', read_room)
keep_fields('reaper', is_count)
repair_policies()
for _, band in ipairs(queue_policy(prefix).bands) do
  for _, kind in ipairs({'ready:', 'heads:', 'idle:'}) do keep_type(kind .. band, 'zset') end
end
repair_engines()
recount_rooms(prefix)
repair_tenants()
redis.call('HSET', queue, 'num_started', recount_started(prefix))
for tenant in pairs(all_tenants()) do forget_idle(prefix, tenant) end
wake_all(prefix)
return found
