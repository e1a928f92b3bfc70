-- uses: life
-- The requests of a dead engine.
--
-- A request that dies with its engine is queued again. If it may have killed the engine, it is a suspect: it runs alone
-- until it has passed the point of its death. So its next death is its own, and the other requests of its batch are
-- cleared by surviving. It is parked when max_deliveries engines in a row have died on it, the last of them while it
-- was alone.
--
-- Which requests are suspects: after a death caused by the engine itself (fault, abort, stall), every request it held.
-- A death from outside (SIGKILL without an out-of-memory kill, a lost host) says nothing about requests that had made
-- progress. For a request without progress it counts as a death, but the request becomes a suspect only shortly before
-- it would be parked.

local function requeue_or_park(prefix, id, is_external, is_alone, max_deliveries, cause, engine)
  local key = prefix .. 'request:' .. id
  local request = fields(key, 'count', 'claimed_count', 'deaths', 'acquittals')
  local count = whole(request.count)
  if not count then
    set_aside(prefix, id, {engine = engine})
    return true
  end
  local progress = count - (whole(request.claimed_count) or count)
  local deaths = whole(request.deaths) or 0
  if is_external and progress > 0 then
    redis.call('HSET', key, 'deaths', 0)
    put_back(prefix, key, id, 'returned', 'reclaimed', words_of(cause))
    return false
  end
  if progress >= probation_tokens(request.acquittals) then
    -- Clear the former deaths. If it dies again, its probation is longer.
    if deaths > 0 then redis.call('HSET', key, 'acquittals', (whole(request.acquittals) or 0) + 1) end
    deaths = 0
  end
  deaths = deaths + 1
  redis.call('HSET', key, 'deaths', deaths)
  if deaths >= max_deliveries and is_alone then
    park(prefix, id, cause, 'poisoned', 'poison_request', deaths .. ' engines died while running this request, the last was '
      .. engine .. '; it is parked: see penstock dead show ' .. id)
    return true
  end
  if is_external and deaths < max_deliveries - 1 then
    put_back(prefix, key, id, 'returned', 'reclaimed', words_of(cause))
  else
    put_back(prefix, key, id, 'suspects', 'reclaimed', words_of(cause))
    redis.call('HSET', key, 'suspected_at', now_ms())
  end
  return false
end

-- Reclaim all requests of an engine. Returns {number queued again, number parked}.
local function reclaim_engine(prefix, engine, is_external, max_deliveries, cause)
  local claims_key = prefix .. 'claims:' .. engine
  local claims = redis.call('HGETALL', claims_key)
  local num_returned, num_parked = 0, 0
  for i = 1, #claims, 2 do
    local id = claims[i]
    local request = fields_of(prefix .. 'request:' .. id, 'epoch', 'state')
    if not (whole(request.epoch) and MOVES[request.state]) then
      set_aside(prefix, id, {engine = engine})
      num_parked = num_parked + 1
    elseif request.epoch == claims[i + 1] and request.state == 'claimed' then
      if requeue_or_park(prefix, id, is_external, #claims == 2, max_deliveries, cause, engine) then
        num_parked = num_parked + 1
      else
        num_returned = num_returned + 1
      end
    end
  end
  redis.call('DEL', claims_key)
  redis.call('ZREM', prefix .. 'leases', engine)
  set_capacity(prefix, engine, nil)
  for _, role in ipairs({'ward', 'reserved'}) do
    if redis.call('GET', prefix .. role) == engine then redis.call('DEL', prefix .. role) end
  end
  fail_unserved(prefix, 'no engine is left that serves this model; the last was ' .. engine)
  return {num_returned, num_parked}
end
