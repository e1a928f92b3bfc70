-- uses: lib
-- Budgets of tenants and API keys.
--
-- "budgets" has those of all tenants (shared/queue/budgets.py): TENANT, KEY and PERIOD, each on a line -> JSON with
-- unit, limit, period, and weights of input, cached and output tokens. KEY is empty for all keys of the tenant.
-- "budget_spent" has under the same name, separated by spaces: the start (Unix time) of the period, the amount spent in
-- it here, and the amount spent in other partitions and models, which supervisors write every second. The script that
-- counts an end in the ledger spends it too.
local budgets = {}
do
  local exist
  function budgets.exist(prefix)
    if exist == nil then exist = redis.call('EXISTS', prefix .. 'budgets') == 1 end
    return exist
  end

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

  function budgets.write_spent(prefix, name, start, here, elsewhere)
    local key = prefix .. 'budget_spent'
    if not attempt('HLEN', key) then redis.call('DEL', key) end
    redis.call('HSET', key, name, string.format('%.0f %.17g %.17g', start, here, elsewhere))
  end

  -- Return the budgets that apply to a tenant and account (ledger.lua), with their state.
  local known = {}
  local function budgets_of(prefix, tenant, account)
    local key_name, names, result = string.match(account or '', '^[^\n]*'), {}, {}
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
        result[#result + 1] = budget
      end
    end
    known[owner] = result
    return result
  end

  local function read_state(prefix, budget)
    local spent = attempt('HGET', prefix .. 'budget_spent', budget.name)
    return budgets.read_spent(spent or nil, budget.start)
  end

  -- Return a refusal if a budget is used up: scope, period, unit, limit, and ms until its renewal, -1 if there is none.
  -- Of several, the one that is renewed last.
  function budgets.refusal(prefix, tenant, account)
    if not budgets.exist(prefix) then return nil end
    local last
    for _, budget in ipairs(budgets_of(prefix, tenant, account)) do
      -- A call that asks does not spend.
      if not budget.amount then
        local here, elsewhere = read_state(prefix, budget)
        budget.amount = here + elsewhere
      end
      if budget.amount >= budget.limit and not (last and last.stop >= budget.stop) then last = budget end
    end
    if not last then return nil end
    local scope = string.find(last.name, '\n\n', 1, true) and 'tenant' or 'key'
    local renewed_in_ms = last.stop == math.huge and -1 or math.max(1, last.stop * 1000 - now_ms())
    return {'over_budget', scope, last.period, last.unit, string.format('%.15g', last.limit), renewed_in_ms}
  end

  -- Count sums of the ledger as spent.
  function budgets.spend(prefix, tenant, account, sums, SUMS)
    for _, budget in ipairs(budgets_of(prefix, tenant, account)) do
      local amount = budgets.amount(budget, sums, SUMS)
      if amount > 0 then
        local here, elsewhere = read_state(prefix, budget)
        budgets.write_spent(prefix, budget.name, budget.start, here + amount, elsewhere)
      end
    end
  end
end
