-- Point a name to an adapter; a name that is pinned stays so. KEYS: names, numbers. ARGV: field, model, digest, wanted
-- number or 0, JSON of the rest, and the same pinned.
-- A value of names is "NUMBER\nMODEL\nJSON"; numbers has DIGEST -> number and back, and "last". A number is an
-- adapter's for as long as a name points to it, and never given by itself a second time.
-- Returns {'ok', value, former value or false}, or {'of_model', model}, {'numbered', number}, {'taken', digest}.
local field, model, digest, wanted, rest, pinned_rest = unpack(ARGV)
local former = redis.call('HGET', KEYS[1], field)
local former_model = former and string.match(former, '^%d+\n([^\n]*)\n')
if former_model and former_model ~= model then return {'of_model', former_model} end
local number = redis.call('HGET', KEYS[2], digest)
if number and wanted ~= '0' and wanted ~= number then return {'numbered', number} end
if not number then
  number = wanted
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
-- In JSON a quote within a string is escaped, so this is the field and no part of a path.
if former and string.find(former, '"pinned":true', 1, true) then rest = pinned_rest end
local value = number .. '\n' .. model .. '\n' .. rest
redis.call('HSET', KEYS[1], field, value)
return {'ok', value, former}
