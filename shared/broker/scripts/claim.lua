-- Hand a wave of at most ARGV[3] requests to an engine. KEYS: lane. ARGV: prefix, engine, limit.
-- Each claim raises the request's epoch, which fences every later write. Handed-back requests come first.
-- Returns a list of {id, payload, epoch, count, attempts}.
-- The choice among lanes (bands, ageing, tenant share, deadlines) and poison counting belong here.
local prefix, engine, limit = ARGV[1], ARGV[2], tonumber(ARGV[3])
local lane, wave = KEYS[1], {}

local function take(id, payload)
  local key = prefix .. 'request:' .. id
  if redis.call('HGET', key, 'state') ~= 'queued' then return false end
  local epoch = redis.call('HINCRBY', key, 'epoch', 1)
  local attempts = redis.call('HINCRBY', key, 'attempts', 1)
  redis.call('HSET', key, 'state', 'claimed', 'engine', engine)
  wave[#wave + 1] = {id, payload, epoch, tonumber(redis.call('HGET', key, 'count')), attempts}
  return true
end

while #wave < limit do
  local id = redis.call('LPOP', prefix .. 'returned')
  if not id then break end
  local entry = redis.call('HGET', prefix .. 'request:' .. id, 'entry')
  local found = entry and redis.call('XCLAIM', lane, GROUP, engine, 0, entry)
  if found and found[1] then take(id, found[1][2][4]) end
end

-- Entries that hold no request (cancelled in between, or written by a stranger) leave the lane here, so a
-- second look is needed to fill the wave; the bound keeps the script short whatever the lane holds.
for _ = 1, 8 do
  if #wave >= limit then break end
  local reply = redis.pcall('XREADGROUP', 'GROUP', GROUP, engine, 'COUNT', limit - #wave, 'STREAMS', lane, '>')
  if reply and reply.err then
    if not string.find(reply.err, 'NOGROUP', 1, true) then return redis.error_reply(reply.err) end
    redis.call('XGROUP', 'CREATE', lane, GROUP, '0', 'MKSTREAM')
    reply = redis.call('XREADGROUP', 'GROUP', GROUP, engine, 'COUNT', limit - #wave, 'STREAMS', lane, '>')
  end
  if not reply then break end
  for _, item in ipairs(reply[1][2]) do
    local entry, fields = item[1], item[2]
    local readable = fields[1] == 'id' and fields[3] == 'request'
    if not (readable and take(fields[2], fields[4])) then
      if not readable then redis.call('XADD', prefix .. 'dead', '*', 'entry', entry, unpack(fields)) end
      redis.call('XACK', lane, GROUP, entry)
      redis.call('XDEL', lane, entry)
    end
  end
end
return wave
