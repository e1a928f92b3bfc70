-- What was counted, by time: hashes of a minute, ten minutes and an hour, which whoever counts adds to.
--
-- series:STEP:START holds sums of the STEP seconds from START (Unix time) on; shared/broker/series.py says of what. No one
-- is leader: an addition is one script. Of a moment's tenants so many have fields of their own, the others share one.
local SERIES = {{60, 24 * 3600}, {600, 7 * 24 * 3600}, {3600, 90 * 24 * 3600}} -- seconds, and how long they are kept
local MAX_TENANTS = 100

-- Add to what is counted now: names and amounts in turn, whole numbers; of tenants, kinds, names and amounts in turn.
local function add_to_series(prefix, amounts, tenants)
  local now_s = math.floor(now_ms() / 1000)
  for _, of in ipairs(SERIES) do
    local step, kept = of[1], of[2]
    local start = now_s - now_s % step
    local key = string.format('%sseries:%d:%d', prefix, step, start)
    for i = 1, #amounts, 2 do redis.call('HINCRBY', key, amounts[i], amounts[i + 1]) end
    for i = 1, #tenants, 3 do
      local name = tenants[i + 1]
      if name ~= '' and redis.call('HSETNX', key, 'tenant:' .. name, 0) == 1
        and redis.call('HINCRBY', key, 'tenants', 1) > MAX_TENANTS then
        redis.call('HDEL', key, 'tenant:' .. name)
        redis.call('HINCRBY', key, 'tenants', -1)
        name = ''
      end
      redis.call('HINCRBY', key, tenants[i] .. ':' .. name, tenants[i + 2])
    end
    redis.call('EXPIRE', key, start + step + kept - now_s)
  end
end
