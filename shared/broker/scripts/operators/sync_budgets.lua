-- uses: ledger
-- Bring a partition's budgets up to date. KEYS: leases. ARGV: prefix, a msgpack array of budgets, each with its name,
-- JSON (budgets.lua), the start of the period for which the amount spent elsewhere is known, and that amount; '' for
-- both if it is unknown. Other budgets are removed. Returns name, start and amount spent here of each, as text.
local prefix, key, spent_key = ARGV[1], ARGV[1] .. 'budgets', ARGV[1] .. 'budget_spent'
local known, states, is_used_up = {}, {}, false
ledger.close_hour(prefix)
for _, name in ipairs({'budgets', 'budget_spent'}) do
  if not attempt('HLEN', prefix .. name) then redis.call('DEL', prefix .. name) end
end

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
  local budget = budgets.decode(json)
  local start = budgets.bounds(budget.period)
  local value = redis.call('HGET', spent_key, name) or nil
  local here, elsewhere = budgets.read_spent(value, start)
  if redis.call('HGET', key, name) ~= json then
    here = amount_before(name, budget, start, value)
    redis.call('HSET', key, name, json)
    value = nil
  end
  if known_start == start then elsewhere = known_elsewhere end
  local text = budgets.spent_text(start, here, elsewhere)
  is_used_up = is_used_up or here + elsewhere >= budget.limit
  if value ~= text then redis.call('HSET', spent_key, name, text) end
  known[name] = true
  states[#states + 1] = {name, string.format('%.0f', start), string.format('%.17g', here)}
end
if is_used_up then redis.call('SET', prefix .. 'budget_used_up', 1) else redis.call('DEL', prefix .. 'budget_used_up') end
for _, hash in ipairs({key, spent_key}) do
  for _, name in ipairs(redis.call('HKEYS', hash)) do
    if not known[name] then redis.call('HDEL', hash, name) end
  end
end
return states
