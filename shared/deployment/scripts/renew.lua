-- uses: ranks
-- Renew a rank. KEYS: group. ARGV: engine, generation, rank, ttl_ms, address ("" for all but the first rank), "1" once
-- it serves, experts of the model. Returns status, count, size, address: 'stale' if a later generation has begun,
-- 'over' if the next one must begin, 'leave' if this rank must have all ranks leave, otherwise 'ok'.
local group, rank = KEYS[1], ARGV[3]
local now, ttl_ms = now_ms(), tonumber(ARGV[4])
local function field(name) return redis.call('HGET', group, name) end

if field('generation') ~= ARGV[2] or field('engine:' .. rank) ~= ARGV[1] then return {'stale', 0, 0, ''} end
correct_ranks(group, tonumber(field('count')), ttl_ms)
redis.call('HSET', group, 'until:' .. rank, now + ttl_ms)
if ARGV[5] ~= '' then redis.call('HSET', group, 'address', ARGV[5]) end
if ARGV[6] == '1' then redis.call('HSET', group, 'serves:' .. rank, '1', 'experts', ARGV[7]) end
local count, size = tonumber(field('count')), tonumber(field('size'))
if field('formed') ~= '1' then
  local serving = 0
  for other = 0, count - 1 do
    if tonumber(field('until:' .. other)) < now then redis.call('HSET', group, 'over', '1') end
    if field('serves:' .. other) == '1' then serving = serving + 1 end
  end
  if serving == size then redis.call('HSET', group, 'formed', '1') end
end
local status = 'ok'
if field('over') == '1' then status = 'over' elseif rank == '0' and field('leave') == '1' then status = 'leave' end
return {status, count, size, field('address') or ''}
