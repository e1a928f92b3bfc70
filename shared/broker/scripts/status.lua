-- Where a request stands. KEYS: request. ARGV: prefix, id. Returns nil if it is unknown, else a msgpack array: state, tenant, band,
-- output tokens, claims so far, engine ('' if none), deadline (ms, 0 without one), requests before it in its line (-1 if it does not
-- wait; at most so many: some of them may have been cancelled), requests and tokens of its lane, tokens that wait in
-- the bands above, in its own band, tenants in its own band, measured rate (ms, tokens), whether the queue is paused.
local prefix, id, queue = ARGV[1], ARGV[2], ARGV[1] .. 'queue'
local now = fields_of(KEYS[1], 'state', 'tenant', 'band', 'count', 'attempts', 'engine', 'deadline', 'entry',
  'line', 'number')
if not now[1] then return nil end
local tenant, band, ahead = now[2] or '', now[3] or '', -1
if LINES[now[9]] then
  ahead = redis.call('LPOS', prefix .. now[9], id) or 0
elseif now[8] then
  local due = due_key(prefix, band, tenant)
  local is_by_deadline = queue_policy(prefix).order == 'edf'
  ahead = is_by_deadline and redis.call('ZRANK', due, now[8])
  if not ahead then
    local first = redis.call('XRANGE', lane_key(prefix, band, tenant), '-', '+', 'COUNT', 1)[1]
    local own = whole(now[10]) or 0
    local number = first and fields_of(prefix .. 'request:' .. tostring(first[2][2]), 'number')[1]
    ahead = math.max(0, own - (whole(number) or own))
    if is_by_deadline then
      local depth = whole(redis.call('HGET', prefix .. 'tenant:' .. tenant, 'depth:' .. band)) or 1
      ahead = math.min(depth - 1, ahead + redis.call('ZCARD', due))
    end
  end
end
local lane = redis.call('HMGET', prefix .. 'tenant:' .. tenant, 'depth:' .. band, 'tokens:' .. band)
local above, own = 0, 0
for _, name in ipairs(queue_policy(prefix).bands) do
  local tokens = amount(redis.call('HGET', queue, 'tokens:' .. name))
  if name == band then
    own = tokens
    break
  end
  above = above + tokens
end
local rate = redis.call('HMGET', queue, 'rate_ms', 'rate_tokens', 'paused')
return cmsgpack.pack({now[1], tenant, band, whole(now[4]) or 0, whole(now[5]) or 0, now[6] or '', whole(now[7]) or 0,
  ahead, amount(lane[1]), amount(lane[2]), above, own,
  redis.call('ZCARD', prefix .. 'ready:' .. band), amount(rate[1]), amount(rate[2]), rate[3] and 1 or 0})
