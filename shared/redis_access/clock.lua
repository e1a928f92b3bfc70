-- The clock of this server, and times written by it: leases, schedules, times of earlier checks. Comes before every
-- script that reads the time, also those of batches, groups and the agenda.
--
-- The clock may go back: an administrator corrects it, or a replica with a slower clock takes over. A stored time is
-- then further in the future than any time of its kind can be. Such a time is cut to the longest time that its kind may
-- be ahead. So the lease of a dead owner expires one lease later than it would have, and a live owner, which renews its
-- lease by the new clock, retains it.

-- A call reads its clock before the server numbers a stream entry by the same clock, so a lead of up to this is none.
local marks = {MAX_LEAD_MS = 1000, MAX_CUT = 1000} -- one table, since a script has at most 200 local names

local function now_us()
  if not marks.now_us then
    local seconds, micros = unpack(redis.call('TIME'))
    marks.now_us, marks.seconds = tonumber(seconds) * 1000000 + tonumber(micros), seconds
  end
  return marks.now_us
end
local function now_ms() return math.floor(now_us() / 1000) end
local function now_s() return math.floor(now_us() / 1000000) end

-- Return a stored time (ms), cut to longest_ms from now.
function marks.cut(mark, longest_ms) return math.min(mark, now_ms() + longest_ms) end

-- Cut all scores of a sorted set, but at most MAX_CUT per call, since a script blocks the server.
function marks.cut_all(key, longest_ms)
  local latest = string.format('%.0f', now_ms() + longest_ms)
  local later = redis.call('ZRANGEBYSCORE', key, '(' .. latest, '(+inf', 'LIMIT', 0, marks.MAX_CUT)
  for _, member in ipairs(later) do redis.call('ZADD', key, latest, member) end
end

-- Whether at least this many ms have passed since a stored time. True if it is in the future, since the clock was set
-- then.
function marks.has_passed(mark, ms)
  return not mark or mark > now_ms() or now_ms() - mark >= ms
end

-- Return the epoch of a new owner, higher than the last one. A counter could repeat: if a failover, a file without its
-- last second or a backup has lost the claims of a live owner, that owner and the next would write to one log with the
-- same epoch. While the clock is behind the last epoch, its microseconds still make the epochs of two servers differ.
local function next_epoch(last)
  local time_us = now_us()
  return time_us > (last or 0) and time_us or last + 1 + time_us % 1000000
end
