-- Keys of the model may be written here, and nobody is served before all are. KEYS: place, moved_by, queue.
-- ARGV: prefix, number of the move, number that it had at first. Returns 1; 2 if all keys are here since the move was cut
-- short; 0 if there is a model here that nobody has moved; -1 if the move is an older one than this server knows of.
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
