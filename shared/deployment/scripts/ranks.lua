-- uses: clock
-- When the ranks of a generation count as gone.
--
-- A group is a hash. "until:RANK" is the ms at which that rank counts as gone, "standby:ENGINE" the same for an engine
-- on standby, and "seen_at" the time of the last join or renewal. Ranks renew several times in ttl_ms. If none did for
-- longer, the server was stopped or its clock was set forward, and every rank gets ttl_ms to renew.
local MIN_GAP_MS = 5000

local function correct_ranks(group, count, ttl_ms)
  local now = now_ms()
  local seen_at = tonumber(redis.call('HGET', group, 'seen_at') or now)
  local is_gap = now - seen_at > math.max(ttl_ms, MIN_GAP_MS)
  for rank = 0, count - 1 do
    local mark = tonumber(redis.call('HGET', group, 'until:' .. rank) or 0)
    if is_gap or marks.cut(mark, ttl_ms) < mark then redis.call('HSET', group, 'until:' .. rank, now + ttl_ms) end
  end
  redis.call('HSET', group, 'seen_at', now)
end
