-- Whether another engine had better take a request than this one. Behind claim.lua, whose names it uses.

-- Nil where nothing is ever left to a certain engine: a call makes its functions anew, and who uses none pays for none.
local others
if totals.warm or totals.adapters then
  -- An engine is too full for what is to come to it once it holds half more than its part, and so much of its sequences.
  local TOO_FULL, TOO_FULL_SEQS = 1.5, 1 / 8
  others = {}

  -- Whether an engine with this room holds so much more than its part that others had better take what is to come to it.
  function others.is_too_full(all, of)
    if not all then return false end
    local part = (all.held_seqs + all.num_waiting) * of.seqs / math.max(1, all.seqs)
    return of.held_seqs > TOO_FULL * part + TOO_FULL_SEQS * of.seqs
  end

  -- Whether an engine lives, claims and has room for a request that takes kv_tokens there.
  function others.may_take(name, request, kv_tokens, all)
    local lease = redis.call('ZSCORE', prefix .. 'leases', name)
    local its = read_room(redis.call('HGET', prefix .. 'rooms', name))
    if not (lease and tonumber(lease) > now and its) or redis.call('GET', prefix .. 'ward') == name then return false end
    local num_free = its.seqs - its.held_seqs
    local is_for_few = num_free <= num_kept and is_shared(totals.shared_at)
    if num_free <= 0 or is_for_few and has_equal_part(prefix, request.tenant, its.seqs) then return false end
    local has_cache = its.held_seqs == 0 or its.held_tokens + kv_tokens <= its.tokens
    return has_cache and not others.is_too_full(all, its)
  end
end
