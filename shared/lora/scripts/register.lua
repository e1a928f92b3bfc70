-- Point a name to an adapter; a pinned name stays pinned. KEYS: names, numbers. ARGV: field, model, digest, requested
-- number or 0, JSON of the rest, and the same with pinned.
-- A value of names is "NUMBER\nMODEL\nJSON"; numbers has DIGEST -> number and back, and "last". A number belongs to an
-- adapter while a name points to it, and is not assigned a second time unless requested.
-- Returns {'ok', value, former value or false}, or {'of_model', model}, {'numbered', number}, {'taken', digest}.
local field, model, digest, requested, rest, pinned_rest = unpack(ARGV)
local former = redis.call('HGET', KEYS[1], field)
local former_model = former and string.match(former, '^%d+\n([^\n]*)\n')
if former_model and former_model ~= model then return {'of_model', former_model} end
local number = redis.call('HGET', KEYS[2], digest)
if number and requested ~= '0' and requested ~= number then return {'numbered', number} end
if not number then
  number = requested
  if number == '0' then
    repeat
      number = string.format('%.0f', redis.call('HINCRBY', KEYS[2], 'last', 1))
    until redis.call('HEXISTS', KEYS[2], number) == 0
  else
    local holder = redis.call('HGET', KEYS[2], number)
    if holder then return {'taken', holder} end
  end
  redis.call('HSET', KEYS[2], digest, number, number, digest)
end
-- In JSON a quote within a string is escaped, so this matches the field and not a part of a path.
if former and string.find(former, '"pinned":true', 1, true) then rest = pinned_rest end
local value = number .. '\n' .. model .. '\n' .. rest
redis.call('HSET', KEYS[1], field, value)
return {'ok', value, former}
