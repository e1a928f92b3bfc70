-- The clock of this server, and marks in time: leases, schedules, times of earlier looks. Put in front of every script
-- that knows the time, also of those of batches, groups and the agenda.
--
-- The clock may go back: somebody sets it right, or a replica whose clock is behind takes over. A mark then lies further
-- in the future than a mark of its kind ever does. Such a mark does not count as it stands: it is cut to the longest
-- time that its kind may have left. So a lease of a dead owner ends one lease later, and a living owner, which renews
-- its lease by the new clock, keeps it.

-- A call reads its clock before the server numbers an entry of a stream by the same: so much of a lead is none.
local marks = {MAX_LEAD_MS = 1000, MAX_CUT = 1000} -- one table: a script may have no more than 200 locals

local function now_us()
  if not marks.now_us then
    local seconds, micros = unpack(redis.call('TIME'))
    marks.now_us = tonumber(seconds) * 1000000 + tonumber(micros)
  end
  return marks.now_us
end
local function now_ms() return math.floor(now_us() / 1000) end

-- Return a mark, cut to longest_ms from now.
function marks.cut(mark, longest_ms) return math.min(mark, now_ms() + longest_ms) end

-- Cut all scores of a sorted set; of very many the first, since a script holds up the server.
function marks.cut_all(key, longest_ms)
  local latest = string.format('%.0f', now_ms() + longest_ms)
  local later = redis.call('ZRANGEBYSCORE', key, '(' .. latest, '(+inf', 'LIMIT', 0, marks.MAX_CUT)
  for _, member in ipairs(later) do redis.call('ZADD', key, latest, member) end
end

-- Whether at least so many ms have passed since a mark. If the mark is in the future, nobody knows how many have.
function marks.has_passed(mark, ms)
  return not mark or mark > now_ms() or now_ms() - mark >= ms
end

-- The number of a new owner (an epoch), higher than the last. A count alone would be given twice where a replica, a file
-- without its last second or a backup has forgotten the claims of an owner that lives on: it and the next would write to
-- one log. While the clock is behind the last number, its microseconds still tell two servers apart.
local function next_epoch(last)
  local now = now_us()
  return now > (last or 0) and now or last + 1 + now % 1000000
end
