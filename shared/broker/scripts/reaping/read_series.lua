-- A part of the series that ends now. KEYS: leases. ARGV: prefix, step, Unix time of the last step's start or 0 for now,
-- how many steps before it begin the part, and how many steps it has.
-- Returns the start (s) of the last step, and for each step of the part the fields and sums of its hash.
local prefix, step, last, found = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), {}
if last == 0 then last = math.floor(now_ms() / 1000) end
last = last - last % step
for i = 1, tonumber(ARGV[5]) do
  local start = last - (tonumber(ARGV[4]) + 1 - i) * step
  found[i] = attempt('HGETALL', string.format('%sseries:%d:%d', prefix, step, start)) or {}
end
return {last, found}
