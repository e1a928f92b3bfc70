-- uses: life
-- Repair the data that all requests of a model share, after something other than the scripts has written to it. KEYS:
-- leases. ARGV: prefix. Called when another script has failed, which may have stopped half-way, so all counts are
-- computed again. Data that cannot be read is deleted: it is written again when it is needed. Returns a list of the
-- damage.
local prefix, damage = ARGV[1], {}
local queue = prefix .. 'queue'
local LOST_LEASE_MS = 10000

local function require_type(name, right_type)
  local key_type = redis.call('TYPE', prefix .. name).ok
  if key_type == 'none' or key_type == right_type then return end
  redis.call('DEL', prefix .. name)
  damage[#damage + 1] = name .. ' was a ' .. key_type
end

local function is_number(value) return string.find(value, '^%-?%d') and pcall(amount, value) end
local function is_amount(value) return is_number(value) and tonumber(value) >= 0 end
local function is_integer(value) return #value < 16 and string.find(value, '^%-?%d+$') end
local function is_count(value) return whole(value) end
local function is_rate(value) return not string.find(value, '[^%d.e+ -]') end

-- Delete the fields of a hash whose value is invalid. check_of is one check, or checks by the prefix of a field's name.
-- Returns whether all were valid.
local function keep_fields(name, check_of)
  require_type(name, 'hash')
  local flat, is_whole = redis.call('HGETALL', prefix .. name), true
  for i = 1, #flat, 2 do
    local check = type(check_of) == 'function' and check_of or check_of[string.match(flat[i], '^[a-z_]+')] or is_amount
    if not check(flat[i + 1]) then
      redis.call('HDEL', prefix .. name, flat[i])
      damage[#damage + 1], is_whole = name .. ': ' .. flat[i], false
    end
  end
  return is_whole
end

local function is_limit(value) return value == nil or value == cjson.null or type(value) == 'number' and value > 0 end

local function is_tenant_policy(policy)
  return type(policy) == 'table' and (policy.weight == nil or type(policy.weight) == 'number' and policy.weight > 0)
    and is_limit(policy.requests_per_minute) and is_limit(policy.tokens_per_minute)
    and is_limit(policy.max_concurrent_requests) and is_limit(policy.max_queue_depth)
    and is_limit(policy.max_queue_tokens)
end

local function is_policy(policy)
  if type(policy) ~= 'table' or type(policy.bands or {}) ~= 'table' then return false end
  local has_default = policy.bands == nil
  for _, band in ipairs(policy.bands or {}) do
    if type(band) ~= 'string' then return false end
    has_default = has_default or band == policy.default_band
  end
  local strictness = policy.strictness or 1
  return has_default and type(strictness) == 'number' and strictness > 0 and strictness <= 1
    and (policy.ageing_s == nil or policy.ageing_s == cjson.null or type(policy.ageing_s) == 'number')
    and is_limit(policy.warm_ttl_s) and (policy.affinity_ms == nil or type(policy.affinity_ms) == 'number')
    and (policy.events_kept == nil or type(policy.events_kept) == 'number')
    and is_limit(policy.max_queue_depth) and is_limit(policy.max_queue_tokens)
    and (policy.tenant == nil or is_tenant_policy(policy.tenant))
end

local function decodes(data, check)
  local is_json, value = pcall(cjson.decode, data)
  return is_json and check(value)
end

local function repair_policies()
  local own = redis.call('GET', prefix .. 'policy')
  if own and not decodes(own, is_policy) then
    redis.call('DEL', prefix .. 'policy')
    damage[#damage + 1] = 'policy'
  end
  keep_fields('tenants', function(data) return decodes(data, is_tenant_policy) end)
end

-- Return every tenant that any key names, as a set.
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
    -- A reaper must find an engine that is dead.
    redis.call('ZADD', prefix .. 'leases', 'NX', now_ms() + LOST_LEASE_MS, engine)
    local name = 'claims:' .. engine
    require_type(name, 'hash')
    require_type('warm_for:' .. engine, 'zset')
    local claims = redis.call('HGETALL', prefix .. name)
    for i = 1, #claims, 2 do
      if not whole(claims[i + 1]) then
        local epoch = whole(fields_of(prefix .. 'request:' .. claims[i], 'epoch').epoch) or 0
        redis.call('HSET', prefix .. name, claims[i], epoch)
        damage[#damage + 1] = name .. ': ' .. claims[i]
      end
    end
  end
  for _, client in ipairs(redis.call('ZRANGE', prefix .. 'clients', 0, -1)) do
    require_type('client:' .. client, 'set')
  end
end

-- Return the tokens of the requests in a lane, by their records; of the first MAX_READ, since a script blocks the
-- server.
local MAX_READ = 10000
local function tokens_of(lane)
  local tokens = 0
  for _, entry in ipairs(redis.call('XRANGE', lane, '-', '+', 'COUNT', MAX_READ)) do
    local request = fields_of(prefix .. 'request:' .. tostring(entry[2][2]), 'prompt', 'max')
    tokens = tokens + (whole(request.prompt) or 0) + (whole(request.max) or 0)
  end
  return tokens
end

local function repair_lane(tenant, band, is_blocked)
  require_type('lane:' .. band .. ':' .. tenant, 'stream')
  require_type('due:' .. band .. ':' .. tenant, 'zset')
  local depth = redis.call('XLEN', lane_key(prefix, band, tenant))
  local counted = fields(prefix .. 'tenant:' .. tenant, 'depth:' .. band, 'tokens:' .. band)
  local tokens = whole(counted['depth:' .. band]) == depth and whole(counted['tokens:' .. band])
  if not tokens then tokens = tokens_of(lane_key(prefix, band, tenant)) end
  redis.call('HSET', prefix .. 'tenant:' .. tenant, 'depth:' .. band, depth, 'tokens:' .. band, depth > 0 and tokens or 0)
  local head = first_entry(prefix, band, tenant)
    or redis.call('XRANGE', lane_key(prefix, band, tenant), '-', '+', 'COUNT', 1)[1]
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

for name, right_type in pairs({policy = 'string', active = 'set', returned = 'list', suspects = 'list', leases = 'zset',
  clients = 'zset', deadlines = 'zset', fail_fast = 'set', dead = 'zset', reserved = 'string', ward = 'string',
  blocked = 'zset', vacant = 'zset', outbox = 'stream', events = 'stream', layout = 'string',
  homes = 'zset', grants = 'zset'}) do
  require_type(name, right_type)
end
keep_fields('queue', {credit = is_number, depth = is_integer, tokens = is_integer, num_started = is_count,
  num_awaiting = is_count, ended = is_count, ended_seen = is_count, entered = is_count, rate = is_rate,
  budgets = function(mark) return mark == 'some' or mark == 'used up' end})
keep_fields('rooms', parse_capacity)
keep_fields('reaper', is_count)
keep_fields('home_states', function(state) return string.find(state, '^[0-3] %d+ ?%d* ?%d*$') end)
keep_fields('home_errors', function(home_error) return string.find(home_error, '^model_[a-z_]+ ') end)
repair_policies()
for _, band in ipairs(queue_policy(prefix).bands) do
  for _, kind in ipairs({'ready:', 'heads:', 'idle:'}) do require_type(kind .. band, 'zset') end
end
repair_engines()
recount_capacity(prefix)
repair_tenants()
redis.call('HSET', queue, 'num_started', recount_started(prefix))
for tenant in pairs(all_tenants()) do forget_idle(prefix, tenant) end
wake_all(prefix)
return damage
