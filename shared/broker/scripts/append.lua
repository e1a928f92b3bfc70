-- Append one record to each of many requests: an engine's whole step in one round trip.
-- KEYS: leases. ARGV: prefix, then for each record: id, epoch, index, next_index, record.
-- Returns one number per record: 1 written, 2 already there (the call was repeated), 0 refused: the claim is stale.
-- Numbers are compared as the strings they came as: this runs for every delta there is.
local prefix, verdicts, call = ARGV[1], {}, redis.call
for i = 2, #ARGV, 5 do
  local id, index, next_index, record = ARGV[i], ARGV[i + 2], ARGV[i + 3], ARGV[i + 4]
  local key = prefix .. 'request:' .. id
  local now = call('HMGET', key, 'epoch', 'state', 'count')
  if now[1] ~= ARGV[i + 1] or now[2] ~= 'claimed' then
    verdicts[#verdicts + 1] = 0
  elseif index == now[3] then
    emit(prefix, key, id, record, next_index)
    verdicts[#verdicts + 1] = 1
  else
    verdicts[#verdicts + 1] = tonumber(next_index) <= tonumber(now[3]) and 2 or 0
  end
end
return verdicts
