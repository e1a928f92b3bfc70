-- Append the last record of each of many requests and end them.
-- KEYS: leases. ARGV: prefix, then for each record: id, epoch, index, num_tokens, record, state, num_prompt_tokens,
-- cause of the end, for its event.
-- Returns one number per record: 1 written, 2 already ended by this claim, 0 refused: the claim is stale.
-- num_prompt_tokens corrects the client's estimate; empty where it is not known.
local prefix, verdicts = ARGV[1], {}

local function finish(id, epoch, index, num_tokens, record, state, num_prompt_tokens, cause)
  local key, count = prefix .. 'request:' .. id, index + num_tokens
  local now = fields_of(key, unpack(ENDING_FIELDS))
  if now.epoch ~= epoch then return 0 end
  local prompt = num_prompt_tokens ~= '' and {'prompt', num_prompt_tokens} or {}
  if now.state ~= 'claimed' or index ~= whole(now.count) or not emit(prefix, key, id, record, count, unpack(prompt)) then
    return now.state == state and 2 or 0
  end
  now.count, now.prompt = string.format('%.0f', count), prompt[2] or now.prompt
  close_unsettled(prefix, key, id, state, cause, now)
  return 1
end

-- What has ended is settled, should one after it meet what others than scripts have written, and stop the script.
local is_done, failure = pcall(function()
  for i = 2, #ARGV, 8 do
    verdicts[#verdicts + 1] = finish(ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 2]), tonumber(ARGV[i + 3]), unpack(ARGV, i + 4, i + 7))
  end
end)
settle_ends(prefix)
if not is_done then error(failure, 0) end
return verdicts
