-- uses: ledger
-- Bring a partition's budgets up to date. KEYS: leases. ARGV: prefix, a msgpack array of budgets, each with its name,
-- JSON (budgets.lua), the start of the period for which the amount spent elsewhere is known, and that amount; '' for
-- both if it is unknown. Other budgets are removed. Returns name, start and amount spent here of each, as text.
local prefix, key, spent_key, left_key = ARGV[1], ARGV[1] .. 'budgets', ARGV[1] .. 'budget_spent', ARGV[1] .. 'budget_left'
local known, states, of_tenants, is_changed = {}, {}, {}, false
local MAX_LEFT = 10000 -- tenants in budget_left, of which those without budgets are never removed one by one
for _, hash in ipairs({key, spent_key, left_key}) do
  if not attempt('HLEN', hash) then redis.call('DEL', hash) end
end
local ledger, budgets = open_ledger().books(), open_budgets()
ledger.close_rows(prefix)

-- A new or changed budget of a day or month starts with the use of its period, by the ledger; one of all time with what
-- was spent since it was set.
local function amount_before(name, budget, start, value)
  if budget.period == 'all' then
    local before = budgets.decode(redis.call('HGET', key, name) or nil)
    local is_same = before and before.unit == budget.unit and before.since == budget.since
    return is_same and budgets.read_spent(value, start) or 0
  end
  return ledger.spent_since(prefix, name, budget, start)
end

for _, entry in ipairs(cmsgpack.unpack(ARGV[2])) do
  local name, json, known_start, known_elsewhere = unpack(entry)
  local budget, tenant = budgets.decode(json), string.match(name, '^[^\n]*')
  local start = budgets.bounds(budget.period)
  local value = redis.call('HGET', spent_key, name) or nil
  budget.name, budget.here, budget.elsewhere = name, budgets.read_spent(value, start)
  if redis.call('HGET', key, name) ~= json then
    budget.here = amount_before(name, budget, start, value)
    redis.call('HSET', key, name, json)
    value, is_changed = nil, true
  end
  if known_start == start then budget.elsewhere = known_elsewhere end
  local text = budgets.spent_text(start, budget.here, budget.elsewhere)
  if value ~= text then redis.call('HSET', spent_key, name, text) end
  known[name], of_tenants[tenant] = true, of_tenants[tenant] or {}
  table.insert(of_tenants[tenant], budget)
  states[#states + 1] = {name, string.format('%.0f', start), string.format('%.17g', budget.here)}
end
for tenant, list in pairs(of_tenants) do
  local names = {}
  for i, budget in ipairs(list) do names[i] = budget.name end
  known[tenant], names = true, cmsgpack.pack(names)
  if redis.call('HGET', key, tenant) ~= names then redis.call('HSET', key, tenant, names) end
end
for _, hash in ipairs({key, spent_key}) do
  for _, name in ipairs(redis.call('HKEYS', hash)) do
    if not known[name] then
      redis.call('HDEL', hash, name)
      is_changed = true
    end
  end
end
if is_changed or redis.call('HLEN', left_key) > MAX_LEFT + #states then redis.call('DEL', left_key) end
local mark = #states > 0 and 'some' or nil
for tenant, list in pairs(of_tenants) do
  local allowance, is_used_up = budgets.allowance(list)
  budgets.set_left(prefix, tenant, allowance)
  mark = is_used_up and 'used up' or mark
end
if mark then redis.call('HSET', prefix .. 'queue', 'budgets', mark) else redis.call('HDEL', prefix .. 'queue', 'budgets') end
return states
