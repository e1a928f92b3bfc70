-- uses: lib
-- Budgets of tenants and API keys.
--
-- "budgets" has those of all tenants (shared/queue/budgets.py): TENANT, KEY and PERIOD, each on a line -> JSON with
-- unit, limit, period, and weights of input, cached and output tokens. KEY is empty for all keys of the tenant.
-- "budget_spent" has under the same name, separated by spaces: the start (Unix time) of the period, the amount spent in
-- it here, and the amount spent in other partitions and models, which supervisors write every second. The script that
-- counts an end in the ledger spends it too. "budget_used_up" exists while a budget may be used up, so that requests are
-- checked only then.
local budgets = {}
do
  local known = {}
  local function exists(key)
    if known[key] == nil then known[key] = redis.call('EXISTS', key) == 1 end
    return known[key]
  end

  function budgets.exist(prefix) return exists(prefix .. 'budgets') end
  function budgets.may_refuse(prefix) return exists(prefix .. 'budget_used_up') end
end

-- Create the functions at the first use of one, because most calls of scripts need none.
local function open_budgets()
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
    local now_s = math.floor(now_ms() / 1000)
    if period == 'day' then return now_s - now_s % DAY_S, now_s - now_s % DAY_S + DAY_S end
    if period == 'month' then return month_start(now_s), month_start(month_start(now_s) + 32 * DAY_S) end
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

  -- Return the budgets that apply to a tenant and account (ledger.lua), with the amounts spent when the call began.
  local known = {}
  local function budgets_of(prefix, tenant, account)
    local key_name, names, result, spent_names = string.match(account or '', '^[^\n]*'), {}, {}, {}
    local owner = tenant .. '\n' .. key_name
    if known[owner] then return known[owner] end
    for _, period in ipairs({'day', 'month', 'all'}) do
      names[#names + 1] = tenant .. '\n\n' .. period
      if key_name ~= '' then names[#names + 1] = owner .. '\n' .. period end
    end
    local values = attempt('HMGET', prefix .. 'budgets', unpack(names)) or {}
    for i, name in ipairs(names) do
      local budget = budgets.decode(values[i])
      if budget then
        budget.name, budget.start, budget.stop = name, budgets.bounds(budget.period)
        result[#result + 1], spent_names[#spent_names + 1] = budget, name
      end
    end
    local spent = #result > 0 and attempt('HMGET', prefix .. 'budget_spent', unpack(spent_names)) or {}
    for i, budget in ipairs(result) do
      budget.here, budget.elsewhere = budgets.read_spent(spent[i] or nil, budget.start)
    end
    known[owner] = result
    return result
  end

  -- Return a refusal if a budget is used up: scope, period, unit, limit, and ms until its renewal, -1 if there is none.
  -- Of several, the one that is renewed last.
  function budgets.refusal(prefix, tenant, account)
    if not budgets.may_refuse(prefix) then return nil end
    local last
    for _, budget in ipairs(budgets_of(prefix, tenant, account)) do
      local is_used_up = budget.here + budget.elsewhere >= budget.limit
      if is_used_up and not (last and last.stop >= budget.stop) then last = budget end
    end
    if not last then return nil end
    local scope = string.find(last.name, '\n\n', 1, true) and 'tenant' or 'key'
    local renewed_in_ms = last.stop == math.huge and -1 or math.max(1, last.stop * 1000 - now_ms())
    return {'over_budget', scope, last.period, last.unit, string.format('%.15g', last.limit), renewed_in_ms}
  end

  -- Count sums of the ledger as spent. Several accounts of a call may spend of one budget, so the amount is read again.
  function budgets.spend(prefix, tenant, account, sums, SUMS)
    local key, changes = prefix .. 'budget_spent', {}
    for _, budget in ipairs(budgets_of(prefix, tenant, account)) do
      local amount = budgets.amount(budget, sums, SUMS)
      if amount > 0 then
        local spent = attempt('HGET', key, budget.name)
        if spent == nil then redis.call('DEL', key) end
        local here, elsewhere = budgets.read_spent(spent or nil, budget.start)
        changes[#changes + 1] = budget.name
        changes[#changes + 1] = budgets.spent_text(budget.start, here + amount, elsewhere)
        if here + amount + elsewhere >= budget.limit then redis.call('SET', prefix .. 'budget_used_up', 1) end
      end
    end
    if #changes > 0 then redis.call('HSET', key, unpack(changes)) end
  end
end

setmetatable(budgets, {__index = function(_, name)
  open_budgets()
  return rawget(budgets, name)
end})
