-- Open the target for the keys of a model; no process is served before all are copied. KEYS: place, moved_by, queue.
-- ARGV: prefix, number of the move, its first number. Returns 1; 2 if all keys are here since the move was cut short; 0
-- if a model exists here that was not moved; -1 if the move is older than the last one of this server.
if tonumber(ARGV[2]) < tonumber(redis.call('GET', KEYS[2]) or 0) then return -1 end
if redis.call('EXISTS', KEYS[1]) == 0 then
  if tonumber(redis.call('GET', KEYS[2]) or 0) >= tonumber(ARGV[3]) then
    redis.call('SET', KEYS[2], ARGV[2])
    return 2
  end
  if redis.call('EXISTS', KEYS[3]) == 1 then return 0 end
end
redis.call('SET', KEYS[2], ARGV[2])
redis.call('SET', KEYS[1], '*' .. ARGV[2])
return 1
