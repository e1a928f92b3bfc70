-- uses: lib
-- Counts over time: hashes of a minute, ten minutes and an hour.
--
-- series:STEP:START has sums of the STEP seconds from START (Unix time) on; shared/broker/series.py lists them. No
-- process leads: an addition is one script. In each hash the first MAX_TENANTS tenants have fields of their own, and
-- the others share one.
local SERIES = {{60, 24 * 3600}, {600, 7 * 24 * 3600}, {3600, 90 * 24 * 3600}} -- seconds, and how long they are retained
local MAX_TENANTS = 100

-- Add to the current hashes: amounts has names and whole numbers in turn; tenants has kinds, names and numbers in turn.
local function add_to_series(prefix, amounts, tenants)
  local time_s = now_s()
  for _, resolution in ipairs(SERIES) do
    local step, ttl_s = unpack(resolution)
    local start = time_s - time_s % step
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
    redis.call('EXPIRE', key, start + step + ttl_s - time_s)
  end
end
