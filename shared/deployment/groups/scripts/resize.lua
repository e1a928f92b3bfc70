-- uses: clock
-- The next generation has another size, and this one leaves. KEYS: group. ARGV: size, standby_ms. Returns status, number: 'ok';
-- 'absent'; 'few', with the engines that there are; 'experts', with those of the model, which the size does not divide.
local group, size = KEYS[1], tonumber(ARGV[1])
local now = now_ms()
local fields, at = redis.call('HGETALL', group), {}
for i = 1, #fields, 2 do at[fields[i]] = fields[i + 1] end
if not at.generation then return {'absent', 0} end
local experts = tonumber(at.experts or '0')
if experts > 0 and experts % size ~= 0 then return {'experts', experts} end
if tonumber(at.size) == size then return {'ok', size} end
local engines = tonumber(at.count)
for name, value in pairs(at) do
  if string.sub(name, 1, 8) == 'standby:' then
    local left_ms = tonumber(value) - now
    -- Another clock set what lies further ahead; an engine that still stands by says so again.
    if left_ms < 0 or left_ms > tonumber(ARGV[2]) then redis.call('HDEL', group, name) else engines = engines + 1 end
  end
end
if engines < size then return {'few', engines} end
redis.call('HSET', group, 'size', size, 'leave', '1')
return {'ok', size}
