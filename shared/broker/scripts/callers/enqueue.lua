-- uses: lanes, budgets, images
-- Enqueue requests, each once. KEYS: leases. ARGV: prefix, a msgpack array of requests, then the payload of each, then
-- the bytes of images.
-- A request is an array: id, ttl_ms, client, client_ttl_ms, fail_fast, call, tenant, band, prompt, max, deadline_ms,
-- timeout_ms, is_resumable, webhook, webhook_of, webhook_n, digests, own_digests, layout, may_have_left, adapter,
-- images, account.
--   client           empty if the request is detached
--   call             token of the call; if the caller chose the id, the digests of CONTENT follow, each after a space
--   band             empty for the policy's default
--   prompt, max      numbers of tokens
--   deadline_ms, timeout_ms    by this server's clock, and from the call on; the earlier one holds; either may be nil
--   is_resumable     it has one chunk of input so far
--   webhook, webhook_of, webhook_n    nil without a webhook; the last two are nil if the request has one answer
--   digests, own_digests    as in affinity.lua, a list or nil; and, as words, those by which others find its engine
--   layout           version of the layout of the model's partitions that the caller uses; nil or 0 while it has one
--   may_have_left    whether the tenant now has another partition; it keeps this one while its requests count here
--                    (shared/partitions/)
--   adapter          digest of its adapter, or nil
--   images           nil, or pairs of a digest and the index of its bytes among those of this call
--   account          as in ledger.lua, or nil
-- Returns one answer each: 'new'; 'unserved' if it must not wait and no engine is alive; or the state of the request
-- that already has this id: the caller attaches to it. A repeated call is 'new' again. {'conflict', field}: the request
-- with this id differs in a field, and the caller must not attach to it. 'relaid': this partition has another layout.
-- 'left': the tenant has another partition. Other refusals are lists: {'unknown_band', names}, {'queue_full', scope,
-- unit, limit, retry_after_ms}, {'over_quota', quota, limit, retry_after_ms}, {'given_up', error}: every device has
-- given the model up (homes.lua), or that of budgets.lua.
local prefix, queue, answers = ARGV[1], ARGV[1] .. 'queue', {}
-- Time to live of the marks of an engine, in case a damaged record leaves one behind.
local WARM_FOR_TTL_MS = 600000
local UNKNOWN_RATE_MS, MIN_RETRY_MS, MAX_RETRY_MS = 1000, 100, 3600000
-- Part of the limit that should be free when a refused caller returns: more than one request.
local ROOM_SHARE = 0.05

-- Return the ms until this many requests or tokens are served, by the measured rate. Time since the last end counts too
-- while any request is running, because it shows that service is slow.
local function time_to_serve(number, unit)
  local rate = fields(queue, 'rate_at', 'rate_ms', 'rate_' .. unit, 'num_started')
  local served, ms = amount(rate['rate_' .. unit]), amount(rate.rate_ms)
  if served <= 0 then return UNKNOWN_RATE_MS end
  if amount(rate.num_started) > 0 then ms = ms + math.max(0, now_ms() - amount(rate.rate_at)) end
  return math.floor(math.min(MAX_RETRY_MS, math.max(MIN_RETRY_MS, number * ms / served)))
end

-- Waiting requests and tokens of a tenant, or of all, including the accepted ones of this call.
local backlogs = {}
local function backlog(key)
  if not backlogs[key] then
    local depth, tokens = waiting(prefix, key)
    backlogs[key] = {depth = depth, tokens = tokens}
  end
  return backlogs[key]
end

local function count_accepted(key, tokens)
  local sums = backlogs[key]
  if sums then sums.depth, sums.tokens = sums.depth + 1, sums.tokens + tokens end
end

local function refusal_if_full(scope, key, policy, tokens)
  local most_depth, most_tokens = limit_of(policy.max_queue_depth), limit_of(policy.max_queue_tokens)
  if most_depth == math.huge and most_tokens == math.huge then return nil end
  local queued = backlog(key)
  local unit, limit, over = 'requests', most_depth, queued.depth + 1 - most_depth
  if over <= 0 then unit, limit, over = 'tokens', most_tokens, queued.tokens + tokens - most_tokens end
  -- A request larger than the limit waits alone, so that it is served at all.
  if over <= 0 or (unit == 'tokens' and queued.depth == 0) then return nil end
  -- A tenant is assumed to get an equal part of the service.
  local num_sharing = scope == 'tenant' and math.max(1, redis.call('SCARD', prefix .. 'active')) or 1
  return {'queue_full', scope, unit, limit, time_to_serve((over + ROOM_SHARE * limit) * num_sharing, unit)}
end

local function refusal_if_over_quota(tenant, policy)
  if policy.over_quota ~= 'refuse' then return nil end
  local depth = backlog(prefix .. 'tenant:' .. tenant).depth
  local most = limit_of(policy.max_concurrent_requests)
  if most < math.huge and depth + num_started(prefix, tenant) >= most then
    return {'over_quota', 'max_concurrent_requests', most, time_to_serve(1, 'requests')}
  end
  local at = within_rate_at(prefix, tenant, policy)
  -- The waiting requests will be used before this one.
  local requests, tokens = used(prefix, tenant)
  if at == 0 and requests + depth >= limit_of(policy.requests_per_minute) then at = now_ms() + WINDOW_S * 1000 end
  if at == 0 then return nil end
  local by_requests = requests + depth >= limit_of(policy.requests_per_minute)
  local quota = by_requests and 'requests_per_minute' or 'tokens_per_minute'
  return {'over_quota', quota, policy[quota], at - now_ms()}
end

local function due_at(deadline_ms, timeout_ms)
  local due = deadline_ms or math.huge
  if timeout_ms then due = math.min(due, now_ms() + timeout_ms) end
  return due < math.huge and due or nil
end

-- Written once for all requests of this call: ids by client, and the duration of the clients' leases; ids that must not
-- wait; deadlines, each before its request.
local ids_of_client, lease_ms_of, fail_fast_ids, deadlines = {}, {}, {}, {}
local function collect_holders(id, client, client_ttl_ms, fail_fast, due)
  if client ~= '' then
    ids_of_client[client] = ids_of_client[client] or {}
    table.insert(ids_of_client[client], id)
    lease_ms_of[client] = client_ttl_ms
  end
  if fail_fast then fail_fast_ids[#fail_fast_ids + 1] = id end
  if due then deadlines[#deadlines + 1], deadlines[#deadlines + 2] = due, id end
end

local function write_holders()
  for client, ids in pairs(ids_of_client) do
    redis.call('SADD', prefix .. 'client:' .. client, unpack(ids))
    marks.set_lease(prefix, 'clients', client, lease_ms_of[client])
  end
  if #fail_fast_ids > 0 then redis.call('SADD', prefix .. 'fail_fast', unpack(fail_fast_ids)) end
  if #deadlines > 0 then redis.call('ZADD', prefix .. 'deadlines', unpack(deadlines)) end
end

local is_served_now
local function has_engine()
  if is_served_now == nil then is_served_now = is_served(prefix) end
  return is_served_now
end

local home_error_now
local function model_error()
  if home_error_now == nil then home_error_now = given_up(prefix) or false end
  return home_error_now
end

local function append_all(list, ...)
  for _, value in ipairs({...}) do list[#list + 1] = value end
end

local layout
local function has_layout(version)
  layout = layout or tonumber(redis.call('GET', prefix .. 'layout') or 0) or 0
  return layout == version
end

-- Whether a tenant still has requests here that a new one must queue behind, or be counted with.
local function stays(tenant)
  if backlog(prefix .. 'tenant:' .. tenant).depth > 0 then return true end
  local policy = tenant_policy(prefix, tenant)
  if limit_of(policy.max_concurrent_requests) < math.huge and num_started(prefix, tenant) > 0 then return true end
  return has_rate_quota(policy) and used(prefix, tenant) > 0
end

local requests, preferred, num_warm = cmsgpack.unpack(ARGV[2]), {}, 0 -- preferred: engine -> number of these requests
local mark_warm
for _, request in ipairs(requests) do mark_warm = mark_warm or request[17] and true end
if mark_warm then -- the function is created only if it is needed
  -- Mark a request for the live, claiming engine with the longest prefix of its conversation.
  mark_warm = function(id, digests, own_digests, record)
    local keys = {}
    for i, digest in ipairs(digests) do keys[i] = prefix .. 'warm:' .. digest end
    append_all(record, 'digests', own_digests)
    for _, engine in ipairs(redis.call('MGET', unpack(keys))) do
      local lease = engine and redis.call('ZSCORE', prefix .. 'leases', engine)
      if lease and tonumber(lease) > now_ms() and redis.call('HEXISTS', prefix .. 'rooms', engine) == 1 then
        local warm_for = prefix .. 'warm_for:' .. engine
        num_warm = num_warm + 1
        preferred[engine] = (preferred[engine] or 0) + 1
        append_all(record, 'warm', engine)
        redis.call('ZADD', warm_for, string.format('%.0f', now_us() + num_warm), id)
        redis.call('PEXPIRE', warm_for, WARM_FOR_TTL_MS)
        redis.call('HINCRBY', queue, 'warm', 1)
        return
      end
    end
  end
end

local mark_adapter
for _, request in ipairs(requests) do mark_adapter = mark_adapter or request[21] and true end
if mark_adapter then
  -- Record which adapter a request needs, and wake the emptiest vacant engine that has it.
  mark_adapter = function(adapter, record)
    append_all(record, 'adapter', adapter)
    redis.call('HSET', queue, 'adapters', 1)
    local best, least
    local engines = redis.call('ZRANGEBYSCORE', prefix .. 'adapter:' .. adapter, now_ms(), '+inf', 'LIMIT', 0, 16)
    for _, engine in ipairs(engines) do
      local fullness = redis.call('ZSCORE', prefix .. 'vacant', engine)
      fullness = fullness and tonumber(fullness)
      if fullness and (not least or fullness < least) then best, least = engine, fullness end
    end
    if best then preferred[best] = (preferred[best] or 0) + 1 end
  end
end

-- Store the bytes of images for a request. Returns their digests separated by spaces.
local function store_images(id, images)
  local digests = {}
  for i, image in ipairs(images) do
    local key = prefix .. 'image:' .. image[1]
    if redis.call('EXISTS', key) == 0 then redis.call('SET', key, ARGV[2 + #requests + image[2]]) end
    digests[i] = image[1]
  end
  digests = table.concat(digests, ' ')
  hold_images(prefix, id, digests)
  return digests
end

-- Return the first field in which a request differs from the known one with its id; nil if it does not. Without digests
-- (an id that was generated, or an older client) only the tenant is compared.
local CONTENT = {'prompt', 'params', 'lora_request'}
local function difference(known_tenant, known_call, tenant, call)
  if known_tenant and known_tenant ~= tenant then return 'tenant' end
  local known = string.gmatch(known_call or '', ' (%S+)')
  local i = 0
  for digest in string.gmatch(call, ' (%S+)') do
    i = i + 1
    local known_digest = known()
    if known_digest and known_digest ~= digest then return CONTENT[i] or 'content' end
  end
end

-- Decide about a request without writing it. Accepted requests are entered afterwards.
local accepted, accepted_by_id = {}, {}
local function decide(request, payload)
  local id, _, client, client_ttl_ms, fail_fast, call, tenant, band, prompt, most, deadline_ms, timeout_ms =
    unpack(request, 1, 12)
  local laid_out, may_have_left = request[19], request[20]
  local key = prefix .. 'request:' .. id
  local known_state, known_call = values_of(key, 'state', 'call')
  local twin = accepted_by_id[id]
  if twin then known_state, known_call = 'queued', twin[6] end
  if known_state then
    if call ~= '' and known_call == call then return 'new' end
    local field = difference(twin and twin[7] or values_of(key, 'tenant'), known_call, tenant, call)
    return field and {'conflict', field} or known_state
  end
  if known_state == nil then redis.call('DEL', key) end -- it is not a hash
  if not has_layout(laid_out or 0) then return 'relaid' end
  if may_have_left and not stays(tenant) then return 'left' end
  if band == '' then band = queue_policy(prefix).default_band end
  if not has_band(prefix, band) then return {'unknown_band', table.concat(queue_policy(prefix).bands, ', ')} end
  local home_error = model_error()
  if home_error then return {'given_up', home_error} end
  if fail_fast and not has_engine() then return 'unserved' end
  local policy, tokens = tenant_policy(prefix, tenant), prompt + most
  local refusal = refusal_if_full('model', queue, queue_policy(prefix), tokens)
    or refusal_if_full('tenant', prefix .. 'tenant:' .. tenant, policy, tokens) or refusal_if_over_quota(tenant, policy)
    or marks.budgets == 'used up' and open_budgets().refusal(prefix, tenant, request[23])
  if refusal then return refusal end
  local due = due_at(deadline_ms, timeout_ms)
  count_accepted(queue, tokens)
  count_accepted(prefix .. 'tenant:' .. tenant, tokens)
  collect_holders(id, client, client_ttl_ms, fail_fast, due)
  accepted_by_id[id] = request
  accepted[#accepted + 1] = {request = request, payload = payload, band = band, due = due}
  return 'new'
end

local function enter(request, payload, band, due)
  local id, ttl_ms, client, _, fail_fast, call, tenant, _, prompt, most, _, timeout_ms, is_resumable, webhook, webhook_of,
    webhook_n, digests, own_digests, _, _, adapter, images, account = unpack(request, 1, 23)
  local record = {'epoch', '0', 'ttl', ttl_ms, 'call', call, 'prompt', prompt, 'max', most}
  if due then append_all(record, 'deadline', due) end
  if timeout_ms then append_all(record, 'timeout', timeout_ms) end
  if client ~= '' then append_all(record, 'client', client) end
  if fail_fast then append_all(record, 'fail_fast', 1) end
  if is_resumable then
    append_all(record, 'chunks', 1)
    redis.call('DEL', prefix .. 'input:' .. id)
  end
  if images then append_all(record, 'images', store_images(id, images)) end
  if account then append_all(record, 'account', account) end
  if webhook then append_all(record, 'webhook', webhook) end
  if webhook_of then append_all(record, 'webhook_of', webhook_of, 'webhook_n', webhook_n) end
  -- The first answer comes first, so existing ends are of an earlier request with this id, which was accepted in part.
  if webhook_of == id then redis.call('DEL', prefix .. 'ends:' .. id) end
  if digests and queue_policy(prefix).warm_ttl_s ~= cjson.null then mark_warm(id, digests, own_digests, record) end
  if adapter then mark_adapter(adapter, record) end
  enter_lane(prefix, id, payload, tenant, band, prompt, most, due, record, 'queued')
end

marks.paused, marks.budgets = values_of(queue, 'paused', 'budgets')
for i, request in ipairs(requests) do answers[i] = decide(request, ARGV[i + 2]) end
write_holders()
-- Count entered requests even if a later one meets foreign data and stops the script.
local is_done, failure = pcall(function()
  for _, entry in ipairs(accepted) do enter(entry.request, entry.payload, entry.band, entry.due) end
end)
count_entered(prefix, preferred)
if not is_done then error(failure, 0) end
trim_events(prefix)
return answers
