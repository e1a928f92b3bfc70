-- uses: ranks
-- Join a group as a rank. KEYS: group. ARGV: engine, requested size, ttl_ms, standby_ms, patience_ms. Returns status,
-- generation, rank, size: 'joined', or 'full' if the engine is on standby. A generation is open to engines until it is
-- full. The next one begins when it is over, when one of its engines joins again, or when one has left without notice,
-- because the others cannot compute without it.
local group, engine = KEYS[1], ARGV[1]
local now, ttl_ms = now_ms(), tonumber(ARGV[3])
local function field(name) return redis.call('HGET', group, name) end
local function number(name) return tonumber(field(name) or '0') end

local generation, count, size = number('generation'), number('count'), number('size')
correct_ranks(group, count, ttl_ms)
local is_over, has_live = generation == 0 or field('over') == '1', false
-- A serving rank may be late, because its collectives notice sooner whether it has left.
local patience = field('formed') == '1' and tonumber(ARGV[5]) or 0
for rank = 0, count - 1 do
  local until_ms = number('until:' .. rank) + patience
  if field('engine:' .. rank) == engine or until_ms < now then
    is_over = true
  else
    has_live = true
  end
end
if not has_live and field('asked') ~= ARGV[2] then
  size = tonumber(ARGV[2])
  redis.call('HSET', group, 'size', size, 'asked', size)
end
if not is_over and (count >= size or field('formed') == '1' or field('leave') == '1') then
  redis.call('HSET', group, 'standby:' .. engine, now + tonumber(ARGV[4]))
  return {'full', string.format('%.0f', generation), -1, size}
end
if is_over then
  for rank = 0, count - 1 do
    redis.call('HDEL', group, 'engine:' .. rank, 'until:' .. rank, 'serves:' .. rank)
  end
  redis.call('HDEL', group, 'over', 'formed', 'address', 'leave')
  -- Like an epoch: a counter could repeat if a failover has lost the last one.
  generation, count = next_epoch(generation), 0
end
redis.call('HDEL', group, 'standby:' .. engine)
redis.call('HSET', group, 'generation', string.format('%.0f', generation), 'count', count + 1,
  'engine:' .. count, engine, 'until:' .. count, now + ttl_ms)
return {'joined', string.format('%.0f', generation), count, size}
