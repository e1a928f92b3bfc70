-- Which requests their readers should look at. KEYS: leases. ARGV: prefix, then of each its id and how many records of
-- its log the reader has. Returns the places, from 0 on, of those whose log has another number, or that are unknown.
local prefix, found = ARGV[1], {}
for i = 2, #ARGV, 2 do
  local num_records = attempt('LLEN', prefix .. 'log:' .. ARGV[i])
  if num_records ~= tonumber(ARGV[i + 1]) or redis.call('EXISTS', prefix .. 'request:' .. ARGV[i]) == 0 then
    found[#found + 1] = i / 2 - 1
  end
end
return found
