-- Close a finished move. Runs at home. KEYS: placements, moves. ARGV: prefix, model, number of the move.
local move = redis.call('HGET', KEYS[2], ARGV[2])
if move and cjson.decode(move).number == ARGV[3] then redis.call('HDEL', KEYS[2], ARGV[2]) end
return 1
