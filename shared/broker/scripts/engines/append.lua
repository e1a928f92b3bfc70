-- uses: lib
-- Append one record to each of many requests: an engine's whole step in one round trip.
-- KEYS: leases. ARGV: prefix, then for each record: id, epoch, index, next_index, record.
-- Returns one number per record: 1 written, 2 already there (the call was repeated), 0 refused: the claim is stale.
-- Numbers are compared as the strings that were passed, because this runs for every delta.
local prefix, verdicts = ARGV[1], {}
for i = 2, #ARGV, 5 do
  local id, index, next_index, record = ARGV[i], ARGV[i + 2], ARGV[i + 3], ARGV[i + 4]
  local key = prefix .. 'request:' .. id
  local epoch, state, logged = values_of(key, 'epoch', 'state', 'count')
  if epoch ~= ARGV[i + 1] or state ~= 'claimed' then
    verdicts[#verdicts + 1] = 0
  elseif index == logged then
    verdicts[#verdicts + 1] = emit(prefix, key, id, record, next_index) and 1 or 0
  else
    local count = whole(logged)
    verdicts[#verdicts + 1] = count and tonumber(next_index) <= count and 2 or 0
  end
end
return verdicts
