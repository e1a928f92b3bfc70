-- uses: measures, homes
-- Return the state of a request. KEYS: request. ARGV: prefix, id. Returns nil if it is unknown, else a msgpack array:
-- state, tenant, band, output tokens, claims so far, engine ('' if none), deadline (ms, 0 without one), requests before
-- it in its line (-1 if it does not wait; an upper bound, since some may have been cancelled), whether that line is of
-- requests that were claimed before; if it waits, the measurements of the queue (measures.lua), else nil; and its
-- tenant: running requests, ms at which its quotas are checked again (as in tenant_stats.lua), weight and quotas, and
-- its lane as there. If it waits, also what may serve the model (readiness of homes.lua), else nil.
local prefix, id = ARGV[1], ARGV[2]
local request = fields_of(KEYS[1], 'state', 'tenant', 'band', 'count', 'attempts', 'engine', 'deadline', 'entry',
  'line', 'number')
if not request.state then return nil end
local tenant, band, ahead = request.tenant or '', request.band or '', -1
if LINES[request.line] then
  ahead = redis.call('LPOS', prefix .. request.line, id) or 0
elseif request.entry then
  local due = due_key(prefix, band, tenant)
  local is_by_deadline = queue_policy(prefix).order == 'edf'
  ahead = is_by_deadline and redis.call('ZRANK', due, request.entry)
  if not ahead then
    local first = redis.call('XRANGE', lane_key(prefix, band, tenant), '-', '+', 'COUNT', 1)[1]
    local own = whole(request.number) or 0
    local number = first and fields_of(prefix .. 'request:' .. tostring(first[2][2]), 'number').number
    ahead = math.max(0, own - (whole(number) or own))
    if is_by_deadline then
      local depth = whole(redis.call('HGET', prefix .. 'tenant:' .. tenant, 'depth:' .. band)) or 1
      ahead = math.min(depth - 1, ahead + redis.call('ZCARD', due))
    end
  end
end
local own, tokens = waiting_in(prefix .. 'tenant:' .. tenant, band)
local lane = {band, count_of(own), count_of(tokens), tonumber(redis.call('ZSCORE', prefix .. 'heads:' .. band, tenant) or 0),
  tonumber(redis.call('ZSCORE', prefix .. 'ready:' .. band, tenant) or -1)}
return cmsgpack.pack({request.state, tenant, band, whole(request.count) or 0, whole(request.attempts) or 0, request.engine or '',
  whole(request.deadline) or 0, ahead, LINES[request.line] and 1 or 0, ahead >= 0 and measures(prefix, band) or cjson.null,
  {tenant, num_started(prefix, tenant), blocked_until(prefix, tenant), limits_of(prefix, tenant), {lane}},
  ahead >= 0 and readiness(prefix) or cjson.null})
