-- Append the last record of a segment of each of many resumable requests, and take them from their engine.
-- KEYS: leases. ARGV: prefix, then for each: id, epoch, index, num_tokens, record, number, num_prompt_tokens, ending.
-- number is the segment's, from 0; ending is the last record of the request, should its input be closed.
-- Returns one number each: 1 written, 2 already written by this claim, 0 refused: the claim is stale.
local prefix, verdicts = ARGV[1], {}

local function end_segment(key, id, number, num_prompt_tokens, ending, count)
  local now = fields(key, 'chunks', 'closed', 'engine', 'tenant', 'band', 'charged', 'charged_at')
  if not (whole(now.chunks) and now.engine and now.tenant and now.band) then return set_aside(prefix, id) end
  local computed = num_prompt_tokens + count
  local charged = whole(now.charged)
  if charged then
    local extra = use_computed(prefix, now.tenant, computed, charged, whole(now.charged_at) or now_ms())
    if extra ~= 0 then charge(prefix, now.band, now.tenant, extra) end
  end
  redis.call('HSET', key, 'segments', number + 1, 'charged', computed, 'charged_at', now_ms())
  redis.call('HDEL', key, 'deaths') -- deaths count in a row, and this engine lives
  if number + 1 < tonumber(now.chunks) then
    redis.call('HSET', key, 'arrived_at', now_ms())
    return put_back(prefix, key, id, 'returned', 'continued')
  end
  redis.call('HSET', key, 'prompt', num_prompt_tokens)
  if now.closed then return end_input(prefix, key, id, ending, count) end
  service.note_released(prefix, key)
  redis.call('HDEL', prefix .. 'claims:' .. now.engine, id)
  redis.call('HDEL', key, 'engine')
  move(key, 'claimed', 'awaiting_input', 'ending', ending, note_move(prefix, id, now.tenant, now.band, 'awaiting_input', count,
    now.engine, ''))
  redis.call('HINCRBY', prefix .. 'queue', 'num_awaiting', 1)
  -- It keeps its place among what its tenant may have under way, but nothing is computed for it.
  stop_working(prefix, 1)
end

for i = 2, #ARGV, 8 do
  local id, epoch, index, number = ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 2]), tonumber(ARGV[i + 5])
  local key, count = prefix .. 'request:' .. id, index + tonumber(ARGV[i + 3])
  local now = fields_of(key, 'epoch', 'state', 'count', 'segments')
  local num_segments = whole(now.segments) or 0
  if now.epoch ~= epoch then
    verdicts[#verdicts + 1] = 0
  elseif now.state == 'claimed' and index == whole(now.count) and number == num_segments
    and emit(prefix, key, id, ARGV[i + 4], count) then
    end_segment(key, id, number, ARGV[i + 6], ARGV[i + 7], count)
    verdicts[#verdicts + 1] = 1
  else
    verdicts[#verdicts + 1] = number < num_segments and 2 or 0
  end
end
return verdicts
