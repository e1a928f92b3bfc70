-- Begin a move, or continue one that was cut short. Runs at home. KEYS: placements, moves. ARGV: prefix, model, target,
-- whether an operator has paused the queue.
-- Returns {'there'}; {'unknown'}; {'other', target} of an unfinished move; or {'begun', number, source, is_paused,
-- whether home records the target already, first number of the move}. Numbers increase, also if this server has lost
-- some.
local model, target = ARGV[2], ARGV[3]
local place, move = redis.call('HGET', KEYS[1], model), redis.call('HGET', KEYS[2], model)
if not place then return {'unknown'} end
local source, is_paused, first = place, ARGV[4], nil
if move then
  local former = cjson.decode(move)
  if former.target ~= target then return {'other', former.target} end
  source, is_paused, first = former.source, former.is_paused, former.first
elseif place == target then
  return {'there'}
end
local seconds, micros = unpack(redis.call('TIME'))
local number = math.max(tonumber(seconds) * 1000000 + tonumber(micros), tonumber(redis.call('HGET', KEYS[2], '') or 0) + 1)
number = string.format('%.0f', number)
first = first or number
redis.call('HSET', KEYS[2], '', number, model,
  cjson.encode({source = source, target = target, is_paused = is_paused, number = number, first = first}))
return {'begun', number, source, is_paused, place == target and 1 or 0, first}
