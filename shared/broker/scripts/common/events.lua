-- What requests live through: one event for each move, none for a token.
--
-- An event stands in the stream "events" of the model, whose latest policy.events_kept are kept, and in the request's own
-- hash, under its id in that stream: so it lives as long as the log, and costs no key. It is lines: version, kind, output
-- tokens, engine, epoch, cause, attempts, prompt and most output tokens, ms from its arrival to its first claim, ms from
-- there to now. Later ones may be absent (shared/queue/request_events.py). In the stream, id, tenant and band are put in front:
-- one value for all costs half of what a field for each does.

-- Note a move; more is the lines after the engine. Returns field and value for the request's hash, or nothing if no events
-- are kept.
local function note_move(prefix, id, tenant, band, kind, count, engine, more)
  if queue_policy(prefix).events_kept == 0 then return end
  local event = '1\n' .. kind .. '\n' .. count .. '\n' .. engine .. more
  return redis.call('XADD', prefix .. 'events', '*', 'e', id .. '\n' .. tenant .. '\n' .. band .. '\n' .. event), event
end

-- A cause as a line of an event.
local function cause_line(cause) return '\n\n' .. string.gsub(string.sub(cause or '', 1, 200), '%c', ' ') end

-- The words of an encoded DeathCause.
local function words_of(cause)
  local is_read, found = pcall(cmsgpack.unpack, cause)
  local words = is_read and type(found) == 'table' and found[3]
  return type(words) == 'string' and words or ''
end

-- Forget the oldest events beyond those that are kept: once in a call that lets requests in, and by reapers.
local function trim_events(prefix)
  local kept = queue_policy(prefix).events_kept
  if kept == 0 then redis.call('DEL', prefix .. 'events') else redis.call('XTRIM', prefix .. 'events', 'MAXLEN', '~', kept) end
end

