-- uses: lib
-- Budgets of tenants and API keys.
--
-- "budgets" has those of all tenants (shared/queue/budgets.py): TENANT, KEY and PERIOD, each on a line -> JSON with
-- unit, limit, period, and weights of input, cached and output tokens. KEY is empty for all keys of the tenant. TENANT
-- alone -> a msgpack array of these names. "budget_spent" has under the same name, separated by spaces: the start (Unix
-- time) of the period, the amount spent in it here, and the amount spent in other partitions and models, which
-- supervisors write every second. The amounts are those of ledger.lua without its rows.
--
-- So that an end costs one command, "budget_left" has for each tenant a number of tokens that it may use before any of
-- its budgets can be used up, or MANY without one. The scripts that count ends decrease it; once it is below 0, the rows
-- are added to the amounts, and it is set again. It expires at the next renewal of any budget.
-- The field "budgets" of "queue" is 'some', or 'used up' while a budget may be used up, so that requests are checked
-- only then; it is absent without budgets. marks.budgets is this field in scripts that read it, false if it is absent.
local budgets -- the functions below, nil until they are needed

-- Create these functions at their first use, because most calls of scripts need none.
local function open_budgets()
  if budgets then return budgets end
  budgets = {MANY = 2 ^ 52}
  local DAY_S = 86400

  -- Return the start of the month of a time, in UTC. Source: Hinnant, "chrono-compatible low-level date algorithms".
  local function month_start(time_s)
    local days = math.floor(time_s / DAY_S)
    local from_era = (days + 719468) % 146097
    local leap_days = math.floor(from_era / 1460) - math.floor(from_era / 36524) + math.floor(from_era / 146096)
    local year = math.floor((from_era - leap_days) / 365)
    local day_of_year = from_era - (365 * year + math.floor(year / 4) - math.floor(year / 100))
    local month = math.floor((5 * day_of_year + 2) / 153)
    return (days - day_of_year + math.floor((153 * month + 2) / 5)) * DAY_S
  end

  -- Return start and end of the current period, which begins at 0 and has no end for "all".
  function budgets.bounds(period)
    local now = now_s()
    if period == 'day' then return now - now % DAY_S, now - now % DAY_S + DAY_S end
    if period == 'month' then return month_start(now), month_start(month_start(now) + 32 * DAY_S) end
    return 0, math.huge
  end

  -- Return the amount of a budget's unit for sums of the ledger, which has the places of SUMS.
  function budgets.amount(budget, sums, SUMS)
    local function sum(name) return sums[SUMS[name]] or 0 end
    return (sum('prompt') + sum('embedding') - sum('cached')) * budget.input + sum('cached') * budget.cached
      + sum('output') * budget.output
  end

  -- Return a definition, or nil if something other than the scripts has written it.
  function budgets.decode(value)
    local is_read, budget = pcall(cjson.decode, value or '')
    if not value or not is_read or type(budget) ~= 'table' then return nil end
    for _, name in ipairs({'limit', 'input', 'cached', 'output'}) do
      if type(budget[name]) ~= 'number' then return nil end
    end
    return budget
  end

  -- Return the amounts spent here and elsewhere since the start of a period.
  function budgets.read_spent(value, start)
    local since, here, elsewhere = string.match(value or '', '^(%d+) (%S+) (%S+)$')
    if tonumber(since) ~= start then return 0, 0 end
    return tonumber(here) or 0, tonumber(elsewhere) or 0
  end

  function budgets.spent_text(start, here, elsewhere)
    return string.format('%.0f %.17g %.17g', start, here, elsewhere)
  end

  -- Return all budgets of a tenant, with the amounts spent when the call read them first, and since then in this call.
  local known = {}
  local function budgets_of(prefix, tenant)
    if known[tenant] then return known[tenant] end
    known[tenant] = {}
    local is_read, names = pcall(cmsgpack.unpack, attempt('HGET', prefix .. 'budgets', tenant) or '')
    if not is_read or type(names) ~= 'table' or #names == 0 then return known[tenant] end
    local values = redis.call('HMGET', prefix .. 'budgets', unpack(names))
    local spent = attempt('HMGET', prefix .. 'budget_spent', unpack(names)) or {}
    for i, name in ipairs(names) do
      local budget = budgets.decode(values[i])
      if budget then
        budget.name, budget.key_name = name, string.match(name, '\n([^\n]*)')
        budget.start, budget.stop = budgets.bounds(budget.period)
        budget.here, budget.elsewhere = budgets.read_spent(spent[i] or nil, budget.start)
        table.insert(known[tenant], budget)
      end
    end
    return known[tenant]
  end

  local function is_of(budget, key_name) return budget.key_name == '' or budget.key_name == key_name end

  -- Return a refusal if a budget is used up: scope, period, unit, limit, and ms until its renewal, -1 if there is none.
  -- Of several, the one that is renewed last.
  function budgets.refusal(prefix, tenant, account)
    local key_name, last = string.match(account or '', '^[^\n]*'), nil
    for _, budget in ipairs(budgets_of(prefix, tenant)) do
      local is_used_up = is_of(budget, key_name) and budget.here + budget.elsewhere >= budget.limit
      if is_used_up and not (last and last.stop >= budget.stop) then last = budget end
    end
    if not last then return nil end
    local renewed_in_ms = last.stop == math.huge and -1 or math.max(1, last.stop * 1000 - now_ms())
    return {'over_budget', last.key_name == '' and 'tenant' or 'key', last.period, last.unit,
      string.format('%.15g', last.limit), renewed_in_ms}
  end

  -- Add sums of the ledger's hour to what a tenant has spent with a key.
  function budgets.spend(prefix, tenant, key_name, hour, sums, SUMS)
    local key = prefix .. 'budget_spent'
    for _, budget in ipairs(budgets_of(prefix, tenant)) do
      local amount = is_of(budget, key_name) and hour >= budget.start and budgets.amount(budget, sums, SUMS) or 0
      if amount > 0 then
        budget.here = budget.here + amount
        local text = budgets.spent_text(budget.start, budget.here, budget.elsewhere)
        if not attempt('HSET', key, budget.name, text) then
          redis.call('DEL', key)
          redis.call('HSET', key, budget.name, text)
        end
      end
    end
  end

  -- Return how many tokens may be used before one of these budgets that are not used up can be, and whether any is.
  function budgets.allowance(list)
    local allowance, is_any_used_up = budgets.MANY, false
    for _, budget in ipairs(list) do
      local left, weight = budget.limit - budget.here - budget.elsewhere, math.max(budget.input, budget.cached, budget.output)
      if left <= 0 then
        is_any_used_up = true
      elseif weight > 0 then
        allowance = math.min(allowance, math.ceil(left / weight) - 1)
      end
    end
    return allowance, is_any_used_up
  end

  -- Set how many tokens a tenant may use until its budgets are read again.
  function budgets.set_left(prefix, tenant, allowance)
    local key = prefix .. 'budget_left'
    if not attempt('HSET', key, tenant, string.format('%.0f', allowance)) then
      redis.call('DEL', key)
      redis.call('HSET', key, tenant, string.format('%.0f', allowance))
    end
    redis.call('EXPIRE', key, select(2, budgets.bounds('day')) - now_s())
  end

  function budgets.allow(prefix, tenant)
    local allowance, is_used_up = budgets.allowance(budgets_of(prefix, tenant))
    budgets.set_left(prefix, tenant, allowance)
    if is_used_up then
      marks.budgets = 'used up'
      redis.call('HSET', prefix .. 'queue', 'budgets', marks.budgets)
    end
  end
  return budgets
end
