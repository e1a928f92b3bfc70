-- uses: lib
-- Append one record to each of many requests: an engine's whole step in one round trip.
-- KEYS: leases. ARGV: prefix, then for each record: id, epoch, index, next_index, record, used: with the first token as in
-- ledger.lua, empty later.
-- Returns one number per record: 1 written, 2 already there (the call was repeated), 0 refused: the claim is stale.
-- Numbers are compared as the strings that were passed, because this runs for every delta.
local prefix, verdicts = ARGV[1], {}
for i = 2, #ARGV, 6 do
  local id, index, next_index, record = ARGV[i], ARGV[i + 2], ARGV[i + 3], ARGV[i + 4]
  local key = prefix .. 'request:' .. id
  local epoch, state, logged = values_of(key, 'epoch', 'state', 'count')
  if epoch ~= ARGV[i + 1] or state ~= 'claimed' then
    verdicts[#verdicts + 1] = 0
  elseif index == logged then
    local used = ARGV[i + 5]
    local is_written
    if used == '' then
      is_written = emit(prefix, key, id, record, next_index)
    else
      is_written = emit(prefix, key, id, record, next_index, 'used', used)
    end
    verdicts[#verdicts + 1] = is_written and 1 or 0
  else
    local count = whole(logged)
    verdicts[#verdicts + 1] = count and tonumber(next_index) <= count and 2 or 0
  end
end
return verdicts
