-- Shared by every script, which this text and the others of this folder are put in front of.
--
-- A request is a hash:
--   state            one of shared/queue/request_state.py, which is where MOVES comes from
--   epoch            given anew by every claim, by the clock in microseconds, and raised by every end that no engine
--                    writes: what an owner writes under another one is refused
--   tenant, band     whose it is, and how urgent
--   prompt, max      its prompt tokens (an estimate until its end, where the prompt is text) and most output tokens
--   deadline         ms of this server's clock at which it expires; absent if it never does
--   timeout          the most ms that it may have until then; absent if only a deadline was given
--   number           its place among all that ever entered its lane
--   entry            its id in the lane; absent once it was claimed
--   arrived_at       ms when it entered its lane, or what is to be answered now came; absent until it was claimed, unless
--                    its entry is numbered by a clock that was ahead
--   line             "returned" or "suspects", where it waits after it was claimed; absent otherwise
--   count            output tokens logged
--   attempts         claims so far (deliveries)
--   charged, charged_at    tokens its tenant was charged at the first claim, and the ms of that
--   held_at          ms of the last claim
--   held_ms          ms for which engines held it in claims that ended before it did; absent if none did
--   engine           who claimed it; claims:ENGINE holds the same the other way round
--   ttl              ms that hash and log outlive the end
--   client           whose lease it lives by; absent when it is detached
--   call             token of the enqueue call that made it
--   claimed_count    count when it was claimed
--   deaths, acquittals    what its former engines died of, see death.lua
--   suspected_at     ms when it became a suspect; absent when it is none
--   chunks           how many chunks of input it has, the first in its payload; absent unless it is resumable
--   segments         how many of them it has answered
--   input_bytes      size of all but the first
--   closed           set when no more will come
--   ending           while it awaits input: the record that ends it, should there come none
--   digests          its own, by which others find the engine that it came to; absent if it has none
--   warm             engine that has the beginning of its conversation, while it stands in its lane; absent without one
--   webhook          who is to be told of its end: an encoded WebhookTarget; absent if nobody is
--   webhook_of, webhook_n    the request whose answer it is, and how many that has: they are told of together
-- Its log and its channel get the same records, in one script. Its encoded bytes are in the lane while it waits there,
-- and in payload:ID from its first claim to its end.

-- A server that does not hold the model, or not yet, or no longer, says so and who does (shared/shards/).
do
  local place = redis.call('GET', ARGV[1] .. 'place')
  if place then return redis.error_reply('ELSEWHERE ' .. place) end
end

local ENDED = {}
for state, next_states in pairs(MOVES) do ENDED[state] = next(next_states) == nil or nil end
local function is_live(state) return MOVES[state] ~= nil and not ENDED[state] end

-- The reply of a command; nil where its key is of another type, which others than scripts have made of it.
local function attempt(...)
  local reply = redis.pcall(...)
  if type(reply) ~= 'table' or not reply.err then return reply end
  if not string.find(reply.err, 'WRONGTYPE', 1, true) then return redis.call(...) end -- raises it as it is
  return nil
end

local function by_name(names, values)
  local found = {}
  for i, name in ipairs(names) do found[name] = values[i] or nil end
  return found
end

-- Fields of a hash by their names; what is absent is nil. A key of another type is raised, and repaired (repair.lua).
local function fields(key, ...) return by_name({...}, redis.call('HMGET', key, ...)) end

-- The same of what belongs to one request: none where the key is no hash, which is how damage to it shows.
local function fields_of(key, ...) return by_name({...}, attempt('HMGET', key, ...) or {}) end

-- The same one by one, for what runs for every delta there is: a table with names takes a third of an append's time.
local function values_of(key, ...) return unpack(attempt('HMGET', key, ...) or {}) end

-- Give a request its next state, and other fields with it. Each script checks what it was asked for before it writes
-- anything, so a move that the table does not have is a mistake in the script, and is raised.
local function move(key, from, to, ...)
  if not (MOVES[from] and MOVES[from][to]) then error('a request cannot go from ' .. from .. ' to ' .. to) end
  redis.call('HSET', key, 'state', to, ...)
end

-- The number that a field holds, which scripts write as digits alone; nil of anything else.
local function whole(value)
  local number = value and #value < 17 and string.find(value, '^%d+$') and tonumber(value)
  return number and number <= 2 ^ 53 and number or nil
end

-- The number that a sum holds, 0 if it is absent. Anything else is raised, and repaired (repair.lua).
local function amount(value)
  local number = tonumber(value or 0)
  if not number or number ~= number or math.abs(number) > 2 ^ 53 then error('a sum is no number: ' .. value) end
  return number
end

-- The same of what cannot be below 0.
local function count_of(value)
  local number = amount(value)
  if number < 0 then error('a count is below 0: ' .. value) end
  return number
end

-- Append a record to the log and publish it. count is the number of output tokens after it, and is written with other
-- fields, if there are any. Returns whether there is a log to append to.
local function emit(prefix, key, id, record, count, ...)
  if not attempt('RPUSH', prefix .. 'log:' .. id, record) then return false end
  redis.call('HSET', key, 'count', count, ...)
  redis.call('PUBLISH', prefix .. 'output:' .. id, record)
  return true
end

-- Leases are sorted sets, "leases" of engines and "clients" of clients. How long the longest of each lasts is in "reaper";
-- "queue" is only where the model lives, and a client may renew its lease elsewhere.
function marks.set_lease(prefix, kind, name, ttl_ms)
  local reaper, field = prefix .. 'reaper', 'longest_ms:' .. kind
  if ttl_ms > amount(redis.call('HGET', reaper, field)) then redis.call('HSET', reaper, field, ttl_ms) end
  redis.call('ZADD', prefix .. kind, now_ms() + ttl_ms, name)
end

-- Cut leases that were set by a clock that was ahead. Where no lease was set since an upgrade, nothing is known of them.
function marks.cut_leases(prefix, kind)
  local longest_ms = amount(redis.call('HGET', prefix .. 'reaper', 'longest_ms:' .. kind))
  if longest_ms > 0 then marks.cut_all(prefix .. kind, longest_ms) end
end

-- Whether any engine holds a lease.
local function is_served(prefix)
  marks.cut_leases(prefix, 'leases')
  return redis.call('ZCOUNT', prefix .. 'leases', now_ms(), '+inf') > 0
end
