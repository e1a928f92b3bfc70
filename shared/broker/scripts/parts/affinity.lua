-- uses: turns
-- Requests that claim.lua leaves to another engine for a short time, because that engine has their conversation in its
-- cache or their adapter loaded. Such a lane is skipped. The order among tenants and bands does not change, and neither
-- do charges.
--
-- Conversations: warm:DIGEST names the engine that last claimed a request with this prefix. A request brings the
-- digests of its conversation's former states, the longest first, and its own digest. At its enqueue it is marked
-- "warm" for the engine that has the longest prefix, if that engine is alive, and it is in warm_for:ENGINE while it is
-- in its lane. Other engines leave it alone for affinity_ms of the policy, while its engine has capacity (delay
-- scheduling: Zaharia et al. 2010). Within a lane an engine may claim its own requests before those that entered up to
-- LOOK_AHEAD - 1 numbers earlier, so at most that many requests overtake one.
--
-- Adapters: adapters_of:ENGINE has the digests of an engine's loaded adapters, adapter:DIGEST the engines that have
-- one. Engines report them periodically, and a report expires (set_adapters.lua). A request whose adapter this engine
-- lacks is left for PATIENCE_MS to engines that have it, are alive, and have capacity. After that any engine claims it
-- and loads the adapter.
--
-- claim is a table of claim.lua: prefix, engine, time_ms, num_kept, shared_at, and all (see capacity_of_all).
local affinity = {PATIENCE_MS = 100, LOOK_AHEAD = 16, MAX_WARM = 16}

-- Whether an engine with this capacity holds so much more than its part that others should claim instead: half more
-- than its part, plus an eighth of its sequences.
function affinity.is_too_full(all, capacity)
  if not all then return false end
  local part = (all.held_seqs + all.num_waiting) * capacity.seqs / math.max(1, all.seqs)
  return capacity.held_seqs > 1.5 * part + capacity.seqs / 8
end

-- Whether another engine is alive, claims requests, and has capacity for one that uses request_tokens of its cache.
function affinity.may_claim(claim, name, request, request_tokens)
  local prefix = claim.prefix
  local lease = redis.call('ZSCORE', prefix .. 'leases', name)
  local capacity = parse_capacity(redis.call('HGET', prefix .. 'rooms', name))
  local is_alive = lease and tonumber(lease) > claim.time_ms
  if not (is_alive and capacity) or redis.call('GET', prefix .. 'ward') == name then return false end
  local num_free = capacity.seqs - capacity.held_seqs
  local is_reserved = num_free <= claim.num_kept and is_shared(claim.shared_at)
  if num_free <= 0 or is_reserved and has_equal_part(prefix, request.tenant, capacity.seqs) then return false end
  local has_cache = capacity.held_seqs == 0 or capacity.held_tokens + request_tokens <= capacity.tokens
  return has_cache and not affinity.is_too_full(claim.all, capacity)
end

-- Return the ms for which to leave a request to the engine that it is warm for; nil to claim it now.
function affinity.left_for_conversation_ms(claim, request, request_tokens)
  local warm_ms = queue_policy(claim.prefix).affinity_ms - (claim.time_ms - request.arrived_at)
  if not request.warm or request.warm == claim.engine or warm_ms <= 0 then return nil end
  return affinity.may_claim(claim, request.warm, request, request_tokens) and warm_ms or nil
end

-- Return the queued requests that are warm for this engine: their number, and by lane their {entry, number} in order of
-- arrival. At most MAX_WARM.
function affinity.read_warm(claim)
  local prefix, warm = claim.prefix, {num = 0, lanes = {}}
  local warm_for = prefix .. 'warm_for:' .. claim.engine
  for _, id in ipairs(attempt('ZRANGE', warm_for, 0, affinity.MAX_WARM - 1) or {}) do
    local request = fields_of(prefix .. 'request:' .. id, 'warm', 'entry', 'number', 'band', 'tenant')
    if request.warm == claim.engine and request.entry and whole(request.number) and request.band and request.tenant then
      local lane = lane_key(prefix, request.band, request.tenant)
      warm.lanes[lane] = warm.lanes[lane] or {}
      table.insert(warm.lanes[lane], {entry = request.entry, number = tonumber(request.number)})
      warm.num = warm.num + 1
    else
      redis.call('ZREM', warm_for, id) -- a damaged record has left it there
    end
  end
  return warm
end

-- Pop the entry of the first warm request of a lane that may overtake the lane's head; nil if none may.
function affinity.pop_warm(claim, warm, lane, head_id)
  if queue_policy(claim.prefix).order ~= 'fcfs' or not warm.lanes[lane] then return nil end
  local head = whole(fields_of(claim.prefix .. 'request:' .. head_id, 'number').number)
  for i, candidate in ipairs(warm.lanes[lane]) do
    if head and candidate.number > head and candidate.number - head < affinity.LOOK_AHEAD then
      return table.remove(warm.lanes[lane], i).entry
    end
  end
end

-- Count a claimed request that was marked for an engine, this one or another, and remove the mark.
function affinity.count_claimed(claim, warm, request)
  attempt('ZREM', claim.prefix .. 'warm_for:' .. request.warm, request.id)
  redis.call('HDEL', claim.prefix .. 'request:' .. request.id, 'warm')
  if request.warm ~= claim.engine then return end
  redis.call('HINCRBY', claim.prefix .. 'queue', 'warm_kept', 1)
  warm.num = warm.num - 1
end

-- Whether this engine has loaded an adapter. has_adapter caches the answers of a call by digest.
function affinity.has_adapter(claim, has_adapter, digest)
  if has_adapter[digest] == nil then
    has_adapter[digest] = redis.call('SISMEMBER', claim.prefix .. 'adapters_of:' .. claim.engine, digest) == 1
  end
  return has_adapter[digest]
end

-- Return the ms for which to leave a request to engines that have its adapter; nil to claim it now. Only the first 16
-- engines with the adapter are read: if none of these has capacity, others rarely do.
function affinity.left_for_adapter_ms(claim, has_adapter, request, request_tokens)
  local digest, left_ms = request.adapter, affinity.PATIENCE_MS - (claim.time_ms - request.arrived_at)
  if not digest or left_ms <= 0 or affinity.has_adapter(claim, has_adapter, digest) then return nil end
  local key = claim.prefix .. 'adapter:' .. digest
  for _, name in ipairs(redis.call('ZRANGEBYSCORE', key, claim.time_ms, '+inf', 'LIMIT', 0, 16)) do
    if name ~= claim.engine and affinity.may_claim(claim, name, request, request_tokens) then return left_ms end
  end
end
