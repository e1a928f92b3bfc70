-- uses: lib
-- Return which logs their readers should read. KEYS: leases. ARGV: prefix, then for each request its id and the number
-- of records that the reader has. Returns the positions, from 0, of requests that are unknown or have another number.
local prefix, changed = ARGV[1], {}
for i = 2, #ARGV, 2 do
  local num_records = attempt('LLEN', prefix .. 'log:' .. ARGV[i])
  if num_records ~= tonumber(ARGV[i + 1]) or redis.call('EXISTS', prefix .. 'request:' .. ARGV[i]) == 0 then
    changed[#changed + 1] = i / 2 - 1
  end
end
return changed
