-- What engines have room for: the room of each, the sums of all, and whom to wake for what comes.
--
-- rooms has each engine's room as its last claim left it: sequences that it takes, those it holds, tokens of its cache,
-- those spoken for. "queue" has their number and sums, changed by differences, so that no claim reads the rooms of all.
-- vacant has the engines whose last claim left room, by how full they are. What comes wakes as many of them as it brings
-- requests, the emptiest first, and takes them out; their next claim puts them in again (join-idle-queue, Lu et al. 2011).
-- Those of which only sequences for tenants that have few are free come last, by so much, and are woken for these alone.
-- A wake may be lost with an engine of whose death nobody knows yet: the next look of a reaper wakes another one.

local ROOM_FIELDS = {'seqs', 'held_seqs', 'tokens', 'held_tokens'}
local ROOM_SUMS = {'room_seqs', 'room_held_seqs', 'room_tokens', 'room_held_tokens'}

local function read_room(text)
  local room, num_fields = {}, 0
  for number in string.gmatch(text or '', '%S+') do
    num_fields = num_fields + 1
    if num_fields <= 4 then room[ROOM_FIELDS[num_fields]] = tonumber(number) end
  end
  return num_fields == 4 and room or nil
end

local function write_room(room)
  return string.format('%.0f %.0f %.0f %.0f', room.seqs, room.held_seqs, room.tokens, room.held_tokens)
end

local ONLY_KEPT = 1000

-- Tell as many engines with room as there are requests. While the model is paused there is nothing to claim.
-- num_for_kept says how many of the requests may have a sequence that an engine of so many keeps; all, if it is absent.
-- preferred has the engines that are told first, where they have room, and for how many of the requests.
local MAX_PASSED_BY = 8 -- engines are mostly alike: what these do not want, hardly another one does
local function wake_engines(prefix, num_requests, num_for_kept, preferred)
  if num_requests < 1 or redis.call('HEXISTS', prefix .. 'queue', 'paused') == 1 then return end
  local vacant, num_woken, num_kept_woken, passed_by = prefix .. 'vacant', 0, 0, {}
  local function is_wanted(engine, fullness)
    if not num_for_kept or fullness < ONLY_KEPT then return true end
    local room = read_room(redis.call('HGET', prefix .. 'rooms', engine))
    if room and num_kept_woken >= num_for_kept(room.seqs) then return false end
    num_kept_woken = num_kept_woken + 1
    return true
  end
  local function lives(engine)
    local lease = redis.call('ZSCORE', prefix .. 'leases', engine)
    return lease and tonumber(lease) > now_ms()
  end
  for engine, num_wanted in pairs(preferred or {}) do
    local fullness = lives(engine) and redis.call('ZSCORE', vacant, engine)
    if fullness and is_wanted(engine, tonumber(fullness)) then
      redis.call('ZREM', vacant, engine)
      redis.call('PUBLISH', prefix .. 'engine:' .. engine .. ':wake', '')
      num_woken = num_woken + num_wanted
    end
  end
  while num_woken < num_requests and #passed_by < 2 * MAX_PASSED_BY do
    local engine, fullness = unpack(redis.call('ZPOPMIN', vacant))
    if not engine then break end
    if lives(engine) then
      if is_wanted(engine, tonumber(fullness)) then
        redis.call('PUBLISH', prefix .. 'engine:' .. engine .. ':wake', '')
        num_woken = num_woken + 1
      else
        passed_by[#passed_by + 1] = fullness
        passed_by[#passed_by + 1] = engine
      end
    end
  end
  if #passed_by > 0 then redis.call('ZADD', vacant, unpack(passed_by)) end
end

-- Note an engine's room. nil takes it away: it claims no more, is woken no more, and others are for what is warm for it.
local function set_room(prefix, engine, room)
  local rooms, queue = prefix .. 'rooms', prefix .. 'queue'
  local text, before = room and write_room(room) or false, redis.call('HGET', rooms, engine)
  if not room then
    redis.call('ZREM', prefix .. 'vacant', engine)
    wake_engines(prefix, attempt('ZCARD', prefix .. 'warm_for:' .. engine) or 0)
  end
  if before == text then return end
  local was = read_room(before)
  if room then redis.call('HSET', rooms, engine, text) else redis.call('HDEL', rooms, engine) end
  local change = (room and 1 or 0) - (was and 1 or 0)
  if change ~= 0 then redis.call('HINCRBY', queue, 'rooms', change) end
  for i, field in ipairs(ROOM_FIELDS) do
    change = (room and room[field] or 0) - (was and was[field] or 0)
    if change ~= 0 then redis.call('HINCRBY', queue, ROOM_SUMS[i], string.format('%.0f', change)) end
  end
end

-- Note that an engine has room, and how full it is. num_kept of its sequences are for tenants that have few.
local function set_vacant(prefix, engine, room, num_kept)
  local fullness = math.max(room.held_seqs / room.seqs, room.held_tokens / math.max(1, room.tokens))
  if room.seqs - room.held_seqs <= num_kept then fullness = fullness + ONLY_KEPT end
  redis.call('ZADD', prefix .. 'vacant', fullness, engine)
end

-- What all engines but this one can hold and hold, as the sums of their rooms; nil if there is no other. Those whose
-- lease has ended, which a reaper is about to find, are taken off; of a crowd of them the first, for what is left to
-- engines that are gone waits no longer than engines are patient.
local MAX_GONE = 64
local function other_rooms(prefix, engine)
  local sums = fields(prefix .. 'queue', 'rooms', unpack(ROOM_SUMS))
  local others, num_others = {}, count_of(sums.rooms)
  for i, field in ipairs(ROOM_FIELDS) do others[field] = count_of(sums[ROOM_SUMS[i]]) end
  local left_out = redis.call('ZRANGEBYSCORE', prefix .. 'leases', '-inf', now_ms(), 'LIMIT', 0, MAX_GONE)
  left_out[#left_out + 1] = engine
  for _, name in ipairs(left_out) do
    local room = read_room(redis.call('HGET', prefix .. 'rooms', name))
    if room then
      num_others = num_others - 1
      for _, field in ipairs(ROOM_FIELDS) do others[field] = others[field] - room[field] end
    end
  end
  others.num = num_others
  return num_others > 0 and others or nil
end

-- Sum the rooms up anew: differences carry a mistake on for ever, and others than scripts may write to either.
local function recount_rooms(prefix)
  local num_rooms, sums = 0, {seqs = 0, held_seqs = 0, tokens = 0, held_tokens = 0}
  for _, text in ipairs(redis.call('HVALS', prefix .. 'rooms')) do
    local room = read_room(text)
    if room then
      num_rooms = num_rooms + 1
      for field, sum in pairs(sums) do sums[field] = sum + room[field] end
    end
  end
  redis.call('HSET', prefix .. 'queue', 'rooms', num_rooms)
  for i, field in ipairs(ROOM_FIELDS) do
    redis.call('HSET', prefix .. 'queue', ROOM_SUMS[i], string.format('%.0f', sums[field]))
  end
end

-- Tell all engines: what they may claim has changed, whatever they said last.
local function wake_all(prefix) redis.call('PUBLISH', prefix .. 'wake', '') end
