-- Where a request stands. KEYS: request. ARGV: prefix, id. Returns nil if it is unknown, else a msgpack array: state, tenant, band,
-- output tokens, claims so far, engine ('' if none), deadline (ms, 0 without one), requests before it in its line (-1 if it does not
-- wait; at most so many: some of them may have been cancelled), requests and tokens of its lane, tokens that wait in
-- the bands above, in its own band, tenants in its own band, measured rate (ms, tokens), whether the queue is paused.
local prefix, id, queue = ARGV[1], ARGV[2], ARGV[1] .. 'queue'
local now = fields_of(KEYS[1], 'state', 'tenant', 'band', 'count', 'attempts', 'engine', 'deadline', 'entry',
  'line', 'number')
if not now.state then return nil end
local tenant, band, ahead = now.tenant or '', now.band or '', -1
if LINES[now.line] then
  ahead = redis.call('LPOS', prefix .. now.line, id) or 0
elseif now.entry then
  local due = due_key(prefix, band, tenant)
  local is_by_deadline = queue_policy(prefix).order == 'edf'
  ahead = is_by_deadline and redis.call('ZRANK', due, now.entry)
  if not ahead then
    local first = redis.call('XRANGE', lane_key(prefix, band, tenant), '-', '+', 'COUNT', 1)[1]
    local own = whole(now.number) or 0
    local number = first and fields_of(prefix .. 'request:' .. tostring(first[2][2]), 'number').number
    ahead = math.max(0, own - (whole(number) or own))
    if is_by_deadline then
      local depth = whole(redis.call('HGET', prefix .. 'tenant:' .. tenant, 'depth:' .. band)) or 1
      ahead = math.min(depth - 1, ahead + redis.call('ZCARD', due))
    end
  end
end
local depth, tokens_in_lane = waiting_in(prefix .. 'tenant:' .. tenant, band)
local above, own = 0, 0
for _, name in ipairs(queue_policy(prefix).bands) do
  local tokens = amount(redis.call('HGET', queue, 'tokens:' .. name))
  if name == band then
    own = tokens
    break
  end
  above = above + tokens
end
local rate = fields(queue, 'rate_ms', 'rate_tokens', 'paused')
return cmsgpack.pack({now.state, tenant, band, whole(now.count) or 0, whole(now.attempts) or 0, now.engine or '',
  whole(now.deadline) or 0, ahead, amount(depth), amount(tokens_in_lane), above, own,
  redis.call('ZCARD', prefix .. 'ready:' .. band), amount(rate.rate_ms), amount(rate.rate_tokens),
  rate.paused and 1 or 0})
