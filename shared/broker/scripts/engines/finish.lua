-- Append the last record of each of many requests and end them.
-- KEYS: leases. ARGV: prefix, then for each record: id, epoch, index, num_tokens, record, state, num_prompt_tokens,
-- cause of the end, for its event.
-- Returns one number per record: 1 written, 2 already ended by this claim, 0 refused: the claim is stale.
-- num_prompt_tokens corrects the client's estimate; empty where it is not known.
local prefix, verdicts = ARGV[1], {}
for i = 2, #ARGV, 8 do
  local id, epoch, index, num_tokens, record = ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 2]), tonumber(ARGV[i + 3]), ARGV[i + 4]
  local key = prefix .. 'request:' .. id
  local now = fields_of(key, 'epoch', 'state', 'count')
  if now.epoch ~= epoch then
    verdicts[#verdicts + 1] = 0
  elseif now.state == 'claimed' and index == whole(now.count) and emit(prefix, key, id, record, index + num_tokens) then
    if ARGV[i + 6] ~= '' then redis.call('HSET', key, 'prompt', ARGV[i + 6]) end
    close_request(prefix, key, id, ARGV[i + 5], ARGV[i + 7])
    verdicts[#verdicts + 1] = 1
  else
    verdicts[#verdicts + 1] = now.state == ARGV[i + 5] and 2 or 0
  end
end
return verdicts
