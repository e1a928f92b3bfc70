-- uses: tenants
-- Events of requests: one for each move between states, none for a token.
--
-- An event is written to the stream "events" of the model, which retains the latest policy.events_kept, and to the
-- request's hash, under its id in that stream: so it lives as long as the log and needs no key. It is lines: version,
-- kind, output tokens, engine, epoch, cause, attempts, prompt and max output tokens, ms from its arrival to its first
-- claim, ms since then. The last lines may be absent (shared/queue/lifecycle.py). In the stream, id, tenant and
-- band come first: one value for all costs half as much as a field for each.

-- Write the event of a move. more is the lines after the engine. Returns field and value for the request's hash, or
-- nothing if no events are retained.
local function note_move(prefix, id, tenant, band, kind, count, engine, more)
  if queue_policy(prefix).events_kept == 0 then return end
  local event = '1\n' .. kind .. '\n' .. count .. '\n' .. engine .. more
  return redis.call('XADD', prefix .. 'events', '*', 'e', id .. '\n' .. tenant .. '\n' .. band .. '\n' .. event), event
end

-- Return a cause as a line of an event.
local function cause_line(cause) return '\n\n' .. string.gsub(string.sub(cause or '', 1, 200), '%c', ' ') end

-- Return the text of an encoded DeathCause.
local function words_of(cause)
  local is_read, found = pcall(cmsgpack.unpack, cause)
  local words = is_read and type(found) == 'table' and found[3]
  return type(words) == 'string' and words or ''
end

-- Delete the oldest events beyond events_kept. Called once per enqueue, and by reapers.
local function trim_events(prefix)
  local kept = queue_policy(prefix).events_kept
  if kept == 0 then redis.call('DEL', prefix .. 'events') else redis.call('XTRIM', prefix .. 'events', 'MAXLEN', '~', kept) end
end

