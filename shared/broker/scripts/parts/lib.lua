-- uses: clock
-- The basis of every script.
--
-- A request is a hash:
--   state            one of shared/queue/lifecycle.py, from which MOVES is generated
--   epoch            set by every claim, from the clock in microseconds, and increased by every end that no engine writes:
--                    writes of an owner with another epoch are refused
--   tenant, band     its owner and its priority
--   prompt, max      its prompt tokens (an estimate until its end, if the prompt is text) and max output tokens
--   deadline         ms of this server's clock at which it expires; absent if it never does
--   timeout          max ms until then; absent if only a deadline was passed
--   number           its number among all requests that ever entered its lane
--   entry            its id in the lane; absent after its first claim
--   arrived_at       ms when it entered its lane, or when the input to answer next arrived; absent until its first claim,
--                    unless its entry is numbered by a clock that was ahead
--   line             "returned" or "suspects", the list in which it waits after a claim; absent otherwise
--   count            output tokens logged
--   attempts         claims so far (deliveries)
--   charged, charged_at    tokens its tenant was charged at the first claim, and the ms of that
--   held_at          ms of the last claim
--   held_ms          ms for which engines held it in claims that ended before it did; absent if none did
--   engine           engine that has claimed it; claims:ENGINE has the same in the other direction
--   ttl              ms for which hash and log outlive the end
--   client           client on whose lease it depends; absent if it is detached
--   call             token of the enqueue call that created it
--   claimed_count    count when it was claimed
--   deaths, acquittals    deaths of its former engines, see death.lua
--   suspected_at     ms when it became a suspect; absent if it is none
--   chunks           number of chunks of its input, the first of which is in its payload; absent unless it is resumable
--   segments         number of chunks it has answered
--   input_bytes      size of all chunks but the first
--   closed           set when no more chunks will arrive
--   ending           while it awaits input: the record that ends it if none arrives
--   digests          its own digests, by which other requests find the engine that claimed it; absent if it has none
--   warm             engine that has the prefix of its conversation, while it is in its lane; absent without one
--   webhook          target to notify of its end: an encoded WebhookTarget; absent without one
--   webhook_of, webhook_n    the request of which it is one answer, and the number of answers: they are reported together
-- Its log and its channel get the same records, in one script. Its encoded bytes are in the lane while it waits there,
-- and in payload:ID from its first claim to its end.

-- A server that does not hold the model (not yet, or not any more) says so, and which server does (shared/shards/).
do
  local place = redis.call('GET', ARGV[1] .. 'place')
  if place then return redis.error_reply('ELSEWHERE ' .. place) end
end

local ENDED = {}
for state, next_states in pairs(MOVES) do ENDED[state] = next(next_states) == nil or nil end
local function is_live(state) return MOVES[state] ~= nil and not ENDED[state] end

-- Return the reply of a command; nil if its key has another type, which something other than the scripts has written.
local function attempt(...)
  local reply = redis.pcall(...)
  if type(reply) ~= 'table' or not reply.err then return reply end
  if not string.find(reply.err, 'WRONGTYPE', 1, true) then return redis.call(...) end -- raises it as it is
  return nil
end

local function by_name(names, values)
  local fields = {}
  for i, name in ipairs(names) do fields[name] = values[i] or nil end
  return fields
end

-- Return fields of a hash by name; an absent one is nil. A key of another type is an error, and repaired (repair.lua).
local function fields(key, ...) return by_name({...}, redis.call('HMGET', key, ...)) end

-- Return fields of a hash that belongs to one request. None if the key is not a hash, which is how damage is detected.
local function fields_of(key, ...) return by_name({...}, attempt('HMGET', key, ...) or {}) end

-- Return all fields of such a hash. To find one of its many fields takes as long as to read ten.
local function all_fields_of(key)
  local flat, fields = attempt('HGETALL', key) or {}, {}
  for i = 1, #flat, 2 do fields[flat[i]] = flat[i + 1] end
  return fields
end

-- Return the values one by one, for code that runs per delta: a table of names takes a third of an append's time.
local function values_of(key, ...) return unpack(attempt('HMGET', key, ...) or {}) end

-- Set the next state of a request, and other fields with it. Each script checks its arguments before it writes
-- anything, so a move that the table lacks is a bug of the script, and an error.
local function move(key, from, to, ...)
  if not (MOVES[from] and MOVES[from][to]) then error('a request cannot go from ' .. from .. ' to ' .. to) end
  redis.call('HSET', key, 'state', to, ...)
end

-- Return the number of a field, which scripts write as digits only; nil for anything else.
local function whole(value)
  local number = value and #value < 17 and string.find(value, '^%d+$') and tonumber(value)
  return number and number <= 2 ^ 53 and number or nil
end

-- Return the number of a sum, 0 if it is absent. Anything else is an error, and repaired (repair.lua).
local function amount(value)
  local number = tonumber(value or 0)
  if not number or number ~= number or math.abs(number) > 2 ^ 53 then error('a sum is not a number: ' .. value) end
  return number
end

-- Return the number of a count, which cannot be below 0.
local function count_of(value)
  local number = amount(value)
  if number < 0 then error('a count is below 0: ' .. value) end
  return number
end

-- Append a record to the log and publish it. count is the number of output tokens after it, and is written with other
-- fields, if any. Returns whether there is a log to append to.
local function emit(prefix, key, id, record, count, ...)
  if not attempt('RPUSH', prefix .. 'log:' .. id, record) then return false end
  redis.call('HSET', key, 'count', count, ...)
  redis.call('PUBLISH', prefix .. 'output:' .. id, record)
  return true
end

-- Leases are sorted sets: "leases" of engines, "clients" of clients, "homes" and "grants" of devices. "reaper" has the
-- duration of the longest of each; it is not in "queue", which exists only on the model's server, while a client may
-- renew its lease elsewhere.
function marks.set_lease(prefix, kind, name, ttl_ms)
  local reaper, field = prefix .. 'reaper', 'longest_ms:' .. kind
  if ttl_ms > amount(redis.call('HGET', reaper, field)) then redis.call('HSET', reaper, field, ttl_ms) end
  redis.call('ZADD', prefix .. kind, now_ms() + ttl_ms, name)
end

-- Cut leases that were set by a clock that was ahead. If no lease was set since an upgrade, their duration is unknown.
function marks.cut_leases(prefix, kind)
  local longest_ms = amount(redis.call('HGET', prefix .. 'reaper', 'longest_ms:' .. kind))
  if longest_ms > 0 then marks.cut_all(prefix .. kind, longest_ms) end
end

-- Return whether any engine holds a lease, or a device could wake one (homes.lua). If not, return also the error of a
-- device that has given the model up.
local MAX_HOMES = 256
local function is_served(prefix)
  for _, kind in ipairs({'leases', 'homes'}) do marks.cut_leases(prefix, kind) end
  if redis.call('ZCOUNT', prefix .. 'leases', now_ms(), '+inf') > 0 then return true end
  local last_error
  for _, device in ipairs(redis.call('ZRANGEBYSCORE', prefix .. 'homes', now_ms(), '+inf', 'LIMIT', 0, MAX_HOMES)) do
    last_error = redis.call('HGET', prefix .. 'home_errors', device)
    if not last_error then return true end
  end
  return false, last_error
end

-- Return code and message of the error of requests for a model that no engine serves, and that every device has given
-- up; nil for another model.
local function given_up(prefix)
  if redis.call('EXISTS', prefix .. 'home_errors') == 0 then return nil end
  return (select(2, is_served(prefix)))
end
