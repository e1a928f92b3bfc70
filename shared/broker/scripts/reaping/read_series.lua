-- uses: lib
-- Return a part of the series. KEYS: leases. ARGV: prefix, step, Unix time of the last step's start or 0 for the
-- current one, how many steps before it the part begins, and its number of steps. Returns the start (s) of the last
-- step, and for each step of the part the fields and sums of its hash.
local prefix, step, last, sums = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), {}
if last == 0 then last = math.floor(now_ms() / 1000) end
last = last - last % step
for i = 1, tonumber(ARGV[5]) do
  local start = last - (tonumber(ARGV[4]) + 1 - i) * step
  sums[i] = attempt('HGETALL', string.format('%sseries:%d:%d', prefix, step, start)) or {}
end
return {last, sums}
