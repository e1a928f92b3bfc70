-- uses: lib
-- Capacity of engines: of each, the sums over all, and which engines to wake for new requests.
--
-- rooms has the capacity of each engine as of its last claim: sequences, held sequences, tokens of its cache, reserved
-- tokens. "queue" has the number of engines and the sums, which are updated by differences, so that no claim reads all
-- engines. vacant has the engines that had free capacity after their last claim, by how full they are. New requests
-- wake as many of them as there are requests, the emptiest first, and remove them; their next claim adds them again
-- (join-idle-queue, Lu et al. 2011). Engines whose only free sequences are reserved for tenants with few running
-- requests come last (their fullness is higher by ONLY_KEPT), and are woken for such tenants alone. A wake may be lost
-- with an engine that has died unnoticed; the next check of a reaper wakes another one.

local CAPACITY_FIELDS = {'seqs', 'held_seqs', 'tokens', 'held_tokens'}
local CAPACITY_SUMS = {'room_seqs', 'room_held_seqs', 'room_tokens', 'room_held_tokens'}

local function parse_capacity(text)
  local capacity, num_fields = {}, 0
  for number in string.gmatch(text or '', '%S+') do
    num_fields = num_fields + 1
    if num_fields <= 4 then capacity[CAPACITY_FIELDS[num_fields]] = tonumber(number) end
  end
  return num_fields == 4 and capacity or nil
end

local function format_capacity(capacity)
  return string.format('%.0f %.0f %.0f %.0f', capacity.seqs, capacity.held_seqs, capacity.tokens, capacity.held_tokens)
end

local ONLY_KEPT = 1000

-- Wake as many engines with free capacity as there are requests. None while the model is paused. If no engine claims,
-- tell the devices that could wake one (homes.lua); they read the demand themselves, so this may be lost.
-- num_for_kept(num_seqs) is the number of requests that may have a sequence which an engine with num_seqs reserves;
-- all, if it is nil. preferred has engines to wake first, if they have capacity, and for how many of the requests each.
local MAX_UNSUITABLE = 8 -- engines are mostly alike: if these cannot take the requests, others rarely can
local function wake_engines(prefix, num_requests, num_for_kept, preferred)
  if num_requests < 1 then return end
  if marks.paused == nil then marks.paused = redis.call('HGET', prefix .. 'queue', 'paused') end
  if marks.paused then return end
  local vacant, num_woken, num_kept_woken, unsuitable = prefix .. 'vacant', 0, 0, {}
  local function is_suitable(engine, fullness)
    if not num_for_kept or fullness < ONLY_KEPT then return true end
    local capacity = parse_capacity(redis.call('HGET', prefix .. 'rooms', engine))
    if capacity and num_kept_woken >= num_for_kept(capacity.seqs) then return false end
    num_kept_woken = num_kept_woken + 1
    return true
  end
  local function is_alive(engine)
    local lease = redis.call('ZSCORE', prefix .. 'leases', engine)
    return lease and tonumber(lease) > now_ms()
  end
  for engine, num_preferring in pairs(preferred or {}) do
    local fullness = is_alive(engine) and redis.call('ZSCORE', vacant, engine)
    if fullness and is_suitable(engine, tonumber(fullness)) then
      redis.call('ZREM', vacant, engine)
      redis.call('PUBLISH', prefix .. 'engine:' .. engine .. ':wake', '')
      num_woken = num_woken + num_preferring
    end
  end
  while num_woken < num_requests and #unsuitable < 2 * MAX_UNSUITABLE do
    local engine, fullness = unpack(redis.call('ZPOPMIN', vacant))
    if not engine then break end
    if is_alive(engine) then
      if is_suitable(engine, tonumber(fullness)) then
        redis.call('PUBLISH', prefix .. 'engine:' .. engine .. ':wake', '')
        num_woken = num_woken + 1
      else
        unsuitable[#unsuitable + 1] = fullness
        unsuitable[#unsuitable + 1] = engine
      end
    end
  end
  if #unsuitable > 0 then redis.call('ZADD', vacant, unpack(unsuitable)) end
  if num_woken == 0 and redis.call('HLEN', prefix .. 'rooms') == 0 and redis.call('EXISTS', prefix .. 'homes') == 1 then
    redis.call('PUBLISH', prefix .. 'wanted', '')
  end
end

-- Write an engine's capacity. nil removes it: it claims and is woken no more, and other engines claim the requests that
-- are warm for it.
local function set_capacity(prefix, engine, capacity)
  local rooms, queue = prefix .. 'rooms', prefix .. 'queue'
  local text, before = capacity and format_capacity(capacity) or false, redis.call('HGET', rooms, engine)
  if not capacity then
    redis.call('ZREM', prefix .. 'vacant', engine)
    wake_engines(prefix, attempt('ZCARD', prefix .. 'warm_for:' .. engine) or 0)
  end
  if before == text then return end
  local was = parse_capacity(before)
  if capacity then redis.call('HSET', rooms, engine, text) else redis.call('HDEL', rooms, engine) end
  local change = (capacity and 1 or 0) - (was and 1 or 0)
  if change ~= 0 then redis.call('HINCRBY', queue, 'rooms', change) end
  for i, field in ipairs(CAPACITY_FIELDS) do
    change = (capacity and capacity[field] or 0) - (was and was[field] or 0)
    if change ~= 0 then redis.call('HINCRBY', queue, CAPACITY_SUMS[i], string.format('%.0f', change)) end
  end
end

-- Record that an engine has free capacity, and how full it is. num_kept of its sequences are reserved for tenants with
-- few running requests.
local function set_vacant(prefix, engine, capacity, num_kept)
  local fullness = math.max(capacity.held_seqs / capacity.seqs, capacity.held_tokens / math.max(1, capacity.tokens))
  if capacity.seqs - capacity.held_seqs <= num_kept then fullness = fullness + ONLY_KEPT end
  redis.call('ZADD', prefix .. 'vacant', fullness, engine)
end

-- Return the sums of capacity and load over all engines but this one; nil if there is no other. Engines whose lease has
-- expired are subtracted, up to MAX_EXPIRED: a reaper will find them soon, and a request that is left to one waits no
-- longer than affinity.PATIENCE_MS.
local MAX_EXPIRED = 64
local function capacity_of_others(prefix, engine)
  local sums = fields(prefix .. 'queue', 'rooms', unpack(CAPACITY_SUMS))
  local others, num_others = {}, count_of(sums.rooms)
  for i, field in ipairs(CAPACITY_FIELDS) do others[field] = count_of(sums[CAPACITY_SUMS[i]]) end
  local left_out = redis.call('ZRANGEBYSCORE', prefix .. 'leases', '-inf', now_ms(), 'LIMIT', 0, MAX_EXPIRED)
  left_out[#left_out + 1] = engine
  for _, name in ipairs(left_out) do
    local capacity = parse_capacity(redis.call('HGET', prefix .. 'rooms', name))
    if capacity then
      num_others = num_others - 1
      for _, field in ipairs(CAPACITY_FIELDS) do others[field] = others[field] - capacity[field] end
    end
  end
  others.num = num_others
  return num_others > 0 and others or nil
end

-- Sum up all capacities again, because updates by differences never correct an error, and something other than the
-- scripts may write to either.
local function recount_capacity(prefix)
  local num_rooms, sums = 0, {seqs = 0, held_seqs = 0, tokens = 0, held_tokens = 0}
  for _, text in ipairs(redis.call('HVALS', prefix .. 'rooms')) do
    local capacity = parse_capacity(text)
    if capacity then
      num_rooms = num_rooms + 1
      for field, sum in pairs(sums) do sums[field] = sum + capacity[field] end
    end
  end
  redis.call('HSET', prefix .. 'queue', 'rooms', num_rooms)
  for i, field in ipairs(CAPACITY_FIELDS) do
    redis.call('HSET', prefix .. 'queue', CAPACITY_SUMS[i], string.format('%.0f', sums[field]))
  end
end

-- Wake all engines: what they may claim has changed, whatever their last reply was.
local function wake_all(prefix) redis.call('PUBLISH', prefix .. 'wake', '') end
