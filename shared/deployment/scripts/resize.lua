-- uses: clock
-- Set the size of the next generation, and make this one leave. KEYS: group. ARGV: size, standby_ms. Returns status,
-- number: 'ok'; 'absent'; 'few', with the number of engines; 'experts', with the model's experts if the size does not
-- divide them.
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
    -- A later time was set by another clock; an engine on standby renews it.
    if left_ms < 0 or left_ms > tonumber(ARGV[2]) then redis.call('HDEL', group, name) else engines = engines + 1 end
  end
end
if engines < size then return {'few', engines} end
redis.call('HSET', group, 'size', size, 'leave', '1')
return {'ok', size}
