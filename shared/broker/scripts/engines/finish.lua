-- uses: life
-- Append the last record of each of many requests and end them.
-- KEYS: leases. ARGV: prefix, then for each record: id, epoch, index, num_tokens, record, state, used (ledger.lua), cause
-- of the end, for its event.
-- Returns one number per record: 1 written, 2 already ended by this claim, 0 refused: the claim is stale.
-- The prompt tokens of used replace the client's estimate; it is empty if they are unknown.
local prefix, verdicts = ARGV[1], {}

local function finish(id, epoch, index, num_tokens, record, state, used, cause)
  local key, count = prefix .. 'request:' .. id, index + num_tokens
  local request = all_fields_of(key)
  if request.epoch ~= epoch then return 0 end
  local prompt = used ~= '' and {'prompt', string.match(used, '^%d+')} or {}
  if request.state ~= 'claimed' or index ~= whole(request.count) or not emit(prefix, key, id, record, count, unpack(prompt)) then
    return request.state == state and 2 or 0
  end
  request.count, request.prompt = string.format('%.0f', count), prompt[2] or request.prompt
  if used ~= '' then request.used = used end
  close_unsettled(prefix, key, id, state, cause, request)
  return 1
end

-- Settle ended requests even if a later one meets foreign data and stops the script.
local is_done, failure = pcall(function()
  for i = 2, #ARGV, 8 do
    verdicts[#verdicts + 1] = finish(ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 2]), tonumber(ARGV[i + 3]), unpack(ARGV, i + 4, i + 7))
  end
end)
settle_ends(prefix)
if not is_done then error(failure, 0) end
return verdicts
