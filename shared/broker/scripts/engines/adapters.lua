-- Requests with an adapter go to an engine that has it loaded. Behind claim.lua and others.lua, whose names it uses.
--
-- adapters_of:ENGINE has the digests that an engine has loaded, adapter:DIGEST the engines that have one; the engine says
-- so again and again, and what it has not said for a while does not count (set_adapters.lua). A request whose adapter
-- this engine lacks is left for PATIENCE_MS to those that have it, live, and have room; then anybody takes it, and loads
-- what is missing. Whose turn it is does not change: such a lane is passed by, as one that is warm for another engine.

local adapters
if totals.adapters then
  local MAX_ENGINES = 16 -- of those that have one: if none of so many has room, hardly another one has
  local own = {} -- digest -> whether this engine has it
  adapters = {}

  local function has(digest)
    if own[digest] == nil then
      own[digest] = redis.call('SISMEMBER', prefix .. 'adapters_of:' .. engine, digest) == 1
    end
    return own[digest]
  end

  -- Whether a request is better taken by this engine than by an emptier one.
  function adapters.is_own(request, all)
    return request.adapter and has(request.adapter) and not others.is_too_full(all, room())
  end

  -- ms for which a request is left to others that have its adapter; nil if it is not.
  function adapters.left_for_ms(request, kv_tokens, all)
    local digest, ms = request.adapter, PATIENCE_MS - (now - request.arrived_at)
    if not digest or ms <= 0 or has(digest) then return nil end
    local names = redis.call('ZRANGEBYSCORE', prefix .. 'adapter:' .. digest, now, '+inf', 'LIMIT', 0, MAX_ENGINES)
    for _, name in ipairs(names) do
      if name ~= engine and others.may_take(name, request, kv_tokens, all) then return ms end
    end
    return nil
  end
end
