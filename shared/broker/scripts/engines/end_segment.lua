-- uses: input
-- End one segment of each of many resumable requests: append its last record and release the claim.
-- KEYS: leases. ARGV: prefix, then for each: id, epoch, index, num_tokens, record, number, used, ending.
-- number is the index of the segment, from 0; used is as in ledger.lua; ending is the last record of the request, for when
-- its input is closed.
-- Returns one number each: 1 written, 2 already written by this claim, 0 refused: the claim is stale.
local prefix, verdicts = ARGV[1], {}

local function end_segment(key, id, number, used, ending, count)
  local request = fields(key, 'chunks', 'closed', 'engine', 'tenant', 'band', 'charged', 'charged_at', 'account', 'past',
    'images')
  local num_prompt_tokens = string.match(used, '^%d+')
  if not (whole(request.chunks) and request.engine and request.tenant and request.band) then return set_aside(prefix, id) end
  local computed = num_prompt_tokens + count
  local charged = whole(request.charged)
  if charged then
    local extra = use_computed(prefix, request.tenant, computed, charged, whole(request.charged_at) or now_ms())
    if extra ~= 0 then charge(prefix, request.band, request.tenant, extra) end
  end
  redis.call('HSET', key, 'segments', number + 1, 'charged', computed, 'charged_at', now_ms(), 'used', used, 'past',
    num_prompt_tokens .. ' ' .. count .. ' 0 0 -1')
  request.used, request.count = used, count
  local ledger = open_ledger()
  ledger.count(request, '')
  ledger.write(prefix)
  ledger.spend(prefix)
  redis.call('HDEL', key, 'deaths') -- deaths count in a row, and this engine lives
  if number + 1 < tonumber(request.chunks) then
    redis.call('HSET', key, 'arrived_at', now_ms())
    return put_back(prefix, key, id, 'returned', 'continued')
  end
  redis.call('HSET', key, 'prompt', num_prompt_tokens)
  if request.closed then return end_input(prefix, key, id, ending, count) end
  service.count_released(prefix, key)
  redis.call('HDEL', prefix .. 'claims:' .. request.engine, id)
  redis.call('HDEL', key, 'engine')
  move(key, 'claimed', 'awaiting_input', 'ending', ending, note_move(prefix, id, request.tenant, request.band, 'awaiting_input', count,
    request.engine, ''))
  redis.call('HINCRBY', prefix .. 'queue', 'num_awaiting', 1)
  -- It still counts against its tenant's max_concurrent_requests, but nothing is computed for it.
  stop_working(prefix, 1)
end

for i = 2, #ARGV, 8 do
  local id, epoch, index, number = ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 2]), tonumber(ARGV[i + 5])
  local key, count = prefix .. 'request:' .. id, index + tonumber(ARGV[i + 3])
  local request = fields_of(key, 'epoch', 'state', 'count', 'segments')
  local num_segments = whole(request.segments) or 0
  if request.epoch ~= epoch then
    verdicts[#verdicts + 1] = 0
  elseif request.state == 'claimed' and index == whole(request.count) and number == num_segments
    and emit(prefix, key, id, ARGV[i + 4], count) then
    end_segment(key, id, number, ARGV[i + 6], ARGV[i + 7], count)
    verdicts[#verdicts + 1] = 1
  else
    verdicts[#verdicts + 1] = number < num_segments and 2 or 0
  end
end
return verdicts
