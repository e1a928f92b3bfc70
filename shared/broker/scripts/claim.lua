-- Hand a wave of at most "limit" requests to an engine that holds "held", and renew its lease.
-- KEYS: lane. ARGV: prefix, engine, limit, held, lease_ttl_ms.
-- Each claim raises the request's epoch, which fences every later write. Handed-back requests come first.
-- Returns a list of {id, payload, epoch, count, attempts, alone_until}. alone_until is -1, or the number of output tokens
-- before which the engine is to take no other request: this one may have killed its last engine.
-- The choice among lanes (bands, ageing, tenant share, deadlines) belongs here.
local prefix, engine, limit, held = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local lane, wave = KEYS[1], {}
local now = now_ms()
local WARD_AFTER_MS, WARD_TTL_MS = 2000, 10000
redis.call('ZADD', prefix .. 'leases', now + tonumber(ARGV[5]), engine)

local function take(id, payload, is_suspect)
  local key = prefix .. 'request:' .. id
  local request = redis.call('HMGET', key, 'state', 'count', 'acquittals')
  if request[1] ~= 'queued' then return false end
  local count, alone_until = tonumber(request[2]), -1
  local epoch = redis.call('HINCRBY', key, 'epoch', 1)
  local attempts = redis.call('HINCRBY', key, 'attempts', 1)
  redis.call('HSET', key, 'state', 'claimed', 'engine', engine, 'claimed_count', count)
  redis.call('HDEL', key, 'suspected_at')
  redis.call('HSET', prefix .. 'claims:' .. engine, id, epoch)
  if is_suspect then alone_until = count + probation_tokens(request[3]) end
  wave[#wave + 1] = {id, payload, epoch, count, attempts, alone_until}
  return true
end

-- Take requests of a line of ids whose entries are pending already.
local function take_from(line, most)
  while #wave < most do
    local id = redis.call('LPOP', prefix .. line)
    if not id then return end
    local entry = redis.call('HGET', prefix .. 'request:' .. id, 'entry')
    local found = entry and redis.call('XCLAIM', lane, GROUP, engine, 0, entry)
    if found and found[1] then take(id, found[1][2][4], line == 'suspects') end
  end
end

-- Suspects run alone, so they go to an engine that holds nothing. Where none ever does, one engine, the ward, is given
-- nothing new until it has emptied itself.
local suspect = redis.call('LINDEX', prefix .. 'suspects', 0)
while suspect and redis.call('HGET', prefix .. 'request:' .. suspect, 'state') ~= 'queued' do
  redis.call('LPOP', prefix .. 'suspects') -- cancelled meanwhile
  suspect = redis.call('LINDEX', prefix .. 'suspects', 0)
end
if suspect and limit > 0 then
  if held == 0 then
    take_from('suspects', 1)
    if #wave > 0 then return wave end
  else
    local since = tonumber(redis.call('HGET', prefix .. 'request:' .. suspect, 'suspected_at') or now)
    if now - since > WARD_AFTER_MS then redis.call('SET', prefix .. 'ward', engine, 'NX', 'PX', WARD_TTL_MS) end
    if redis.call('GET', prefix .. 'ward') == engine then
      redis.call('PEXPIRE', prefix .. 'ward', WARD_TTL_MS)
      return wave
    end
  end
end

take_from('returned', limit)

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
    if not (readable and take(fields[2], fields[4], false)) then
      if not readable then
        local id = 'entry-' .. entry
        redis.call('HSET', prefix .. 'parked:' .. id, 'fields', cmsgpack.pack(fields), 'parked_at_ms', now)
        redis.call('ZADD', prefix .. 'dead', now, id)
      end
      redis.call('XACK', lane, GROUP, entry)
      redis.call('XDEL', lane, entry)
    end
  end
end
return wave
