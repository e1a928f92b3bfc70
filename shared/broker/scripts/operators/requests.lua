-- uses: life
-- List requests. KEYS: leases. ARGV: prefix, which ("these", "running" or "waiting"), most, then tenant, band, engine
-- and id prefix to select, each "" for all; for "these" their ids. The order of "waiting": first the requests that were
-- returned; then by band, the lanes with the oldest requests first, each in its order.
-- Returns rows of id, state, tenant, band, count, attempts, engine, arrived_at, charged_at, entry, prompt, max, epoch.
local prefix, which, most, rows = ARGV[1], ARGV[2], tonumber(ARGV[3]), {}
local tenant, band, engine, id_prefix = ARGV[4], ARGV[5], ARGV[6], ARGV[7]

local function is_selected(id, request)
  return (tenant == '' or request[2] == tenant) and (band == '' or request[3] == band) and (engine == '' or request[6] == engine)
    and string.sub(id, 1, #id_prefix) == id_prefix
end

local function add(id)
  if #rows == most then return end
  local request = attempt('HMGET', prefix .. 'request:' .. id, 'state', 'tenant', 'band', 'count', 'attempts', 'engine',
    'arrived_at', 'charged_at', 'entry', 'prompt', 'max', 'epoch')
  if request and request[1] and is_selected(id, request) then rows[#rows + 1] = {id, unpack(request)} end
end

local function add_lane(name, owner)
  local last, count = '-', most - #rows
  while #rows < most do
    local entries = attempt('XRANGE', lane_key(prefix, name, owner), last, '+', 'COUNT', count) or {}
    for _, entry in ipairs(entries) do
      if entry[2][1] == 'id' then add(entry[2][2]) end
    end
    if #entries < count or id_prefix == '' then return end
    last = '(' .. entries[#entries][1]
  end
end

if which == 'these' then
  for i = 8, #ARGV do add(ARGV[i]) end
elseif which == 'running' then
  for _, holder in ipairs(engine == '' and engines_of(prefix) or {engine}) do
    for _, id in ipairs(attempt('HKEYS', prefix .. 'claims:' .. holder) or {}) do add(id) end
  end
elseif engine == '' then -- waiting requests have none
  for _, line in ipairs({'returned', 'suspects'}) do
    for _, id in ipairs(redis.call('LRANGE', prefix .. line, 0, -1)) do add(id) end
  end
  for _, name in ipairs(queue_policy(prefix).bands) do
    if band == '' or band == name then
      local tenants = {tenant}
      if tenant == '' then
        tenants = redis.call('ZRANGE', prefix .. 'heads:' .. name, 0, most - 1)
        for _, blocked in ipairs(redis.call('ZRANGE', prefix .. 'blocked', 0, most - 1)) do
          tenants[#tenants + 1] = blocked
        end
      end
      for _, owner in ipairs(tenants) do
        if #rows == most then break end
        add_lane(name, owner)
      end
    end
  end
end
return rows
