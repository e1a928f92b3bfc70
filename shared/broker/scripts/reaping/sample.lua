-- What is, and not only what was counted: put in front of reap.lua. Whoever reaps first in so many ms samples; what is
-- counted in "queue" by scripts goes into the series with it, by its difference to the last time.
local SAMPLE_EVERY_MS = 10000

local function sample(prefix, sampled_at)
  local now, queue = now_ms(), prefix .. 'queue'
  if not marks.has_passed(whole(sampled_at), SAMPLE_EVERY_MS) then return end
  redis.call('HSET', prefix .. 'reaper', 'sampled_at', now)
  local depth, tokens = waiting(prefix, queue)
  local sums = fields(queue, 'num_started', 'num_awaiting')
  local num_returned = redis.call('LLEN', prefix .. 'returned') + redis.call('LLEN', prefix .. 'suspects')
  local oldest_ms = 0
  for _, band in ipairs(queue_policy(prefix).bands) do
    local head = redis.call('ZRANGE', prefix .. 'heads:' .. band, 0, 0, 'WITHSCORES')[2]
    if head then oldest_ms = math.max(oldest_ms, now - tonumber(head)) end
  end
  local amounts = {'samples', 1, 'waiting', depth + num_returned, 'waiting_tokens', tokens, 'running',
    math.max(0, count_of(sums.num_started) - num_returned), 'oldest_ms', oldest_ms,
    'engines', redis.call('ZCOUNT', prefix .. 'leases', now, '+inf')}
  for state in pairs(ENDED) do
    local seen = fields(queue, 'ended:' .. state, 'ended_seen:' .. state)
    local num_ended = amount(seen['ended:' .. state])
    if num_ended > amount(seen['ended_seen:' .. state]) then
      amounts[#amounts + 1] = 'ended:' .. state
      amounts[#amounts + 1] = num_ended - amount(seen['ended_seen:' .. state])
      redis.call('HSET', queue, 'ended_seen:' .. state, num_ended)
    end
  end
  add_to_series(prefix, amounts, {})
end
