-- uses: input
-- Append a chunk to the input of a resumable request. KEYS: request. ARGV: prefix, id, number, chunk,
-- num_prompt_tokens, max_tokens, max_chunks, max_bytes. number counts chunks from 0, which is in the payload; the last
-- two are limits for all chunks after that one. num_prompt_tokens and max_tokens are of this chunk, as of a request at
-- its enqueue.
-- Returns nil if there is no such request, else a list: {'added'}; {'known'}: the call was repeated; or the reason of a
-- refusal: {'not_resumable'}, {'ended', state}, {'closed'}, {'other_chunk'}: it has another chunk of that number,
-- {'gap', number of the next}, {'full', unit, limit}, or that of budgets.lua.
local prefix, id, number, chunk = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
local key, input, queue = KEYS[1], prefix .. 'input:' .. id, prefix .. 'queue'
local request = fields_of(key, 'state', 'chunks', 'closed', 'input_bytes', 'entry', 'tenant', 'band', 'prompt', 'max',
  'count', 'account')
local state, num_chunks, num_bytes = request.state, whole(request.chunks or '0'), (whole(request.input_bytes) or 0) + #chunk
if not state then return nil end
local is_sound = MOVES[state] and num_chunks and whole(request.prompt) and whole(request.max) and request.tenant and request.band
if not is_sound or not attempt('LLEN', input) then
  if not ENDED[state] then set_aside(prefix, id) end
  return {'ended', ENDED[state] and state or 'parked'}
end
if num_chunks == 0 then return {'not_resumable'} end
if number < num_chunks then
  local is_same = number > 0 and redis.call('LINDEX', input, number - 1) == chunk
  return {is_same and 'known' or 'other_chunk'}
end
if not is_live(state) then return {'ended', state} end
if request.closed then return {'closed'} end
if number > num_chunks then return {'gap', num_chunks} end
if number > tonumber(ARGV[7]) then return {'full', 'chunks', tonumber(ARGV[7])} end
if num_bytes > tonumber(ARGV[8]) then return {'full', 'bytes', tonumber(ARGV[8])} end

local refusal = redis.call('HGET', queue, 'budgets') == 'used up'
  and open_budgets().refusal(prefix, request.tenant, request.account)
if refusal then return refusal end
redis.call('RPUSH', input, chunk)
redis.call('HSET', key, 'chunks', num_chunks + 1, 'input_bytes', num_bytes)
redis.call('HINCRBY', key, 'prompt', ARGV[5])
redis.call('HINCRBY', key, 'max', ARGV[6])
if request.entry then
  -- The sums of its lane include its size, and decrease by the size in its hash when it leaves.
  for _, sums in ipairs({prefix .. 'tenant:' .. request.tenant, queue}) do
    redis.call('HINCRBY', sums, 'tokens:' .. request.band, ARGV[5] + ARGV[6])
  end
end
if state == 'awaiting_input' then resume(prefix, key, id, request) end
return {'added'}
