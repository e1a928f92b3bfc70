-- uses: budgets
-- The ledger: what each tenant has used, by API key and adapter.
--
-- ledger:STEP:START is a hash of the STEP seconds from START (Unix time) on. A field is TENANT, KEY and ADAPTER, each on
-- a line; its value is a msgpack array of sums, in the order of SUMS (shared/broker/ledger.py has the same). A request is
-- counted in the script that ends it, and a resumable one also at the end of each segment. So each token counts once.
-- An end is first added to ledger:open, a hash with the same fields and "start", the hour that they belong to. At the
-- next hour, or before the ledger is read, its sums move to the hashes of that hour and its day, in one script.
--
-- Fields of a request:
--   account          KEY and ADAPTER, and a line "1" if another answer to the same prompt counts the prompt; absent if it
--                    has none of these
--   used             prompt tokens, cached ones of these, and "e" after them if the prompt was pooled, by its engine;
--                    absent before its first token
--   past             prompt and output tokens of its segments that the ledger has already, -1 before the first has ended;
--                    claims after a death of an engine, and the sum of the output tokens then; and output tokens when its
--                    engine died, until it is claimed again, else -1. Absent for most requests
local ledger = {}

-- Create the functions at the first use of one, because most calls of scripts end no request.
local function open_ledger()
  local STEPS = {{3600, 90 * 86400}, {86400, 3 * 366 * 86400}} -- seconds, and how long they are retained
  -- Beyond this many fields in a hash, new ones share one per tenant, and then one for all.
  local MAX_ACCOUNTS, MAX_TENANTS = 10000, 100000
  local MAX_OPEN = 1000
  local SUMS = {finished = 1, cancelled = 2, expired = 3, failed = 4, parked = 5, prompt = 6, cached = 7, output = 8,
    embedding = 9, recomputed = 10, images = 11}
  local NUM_SUMS = 11
  local unwritten -- field -> place -> number; nil without any

  local function sums_of(request)
    local account = request.account and string.match(request.account, '^[^\n]*\n[^\n]*') or '\n'
    local field = request.tenant .. '\n' .. account
    unwritten = unwritten or {}
    local sums = unwritten[field] or {}
    unwritten[field] = sums
    return sums
  end

  local function add(sums, name, number)
    local place = SUMS[name]
    sums[place] = (sums[place] or 0) + number
  end

  -- Return the numbers of the field past.
  function ledger.read_past(past)
    local numbers = {}
    for number in string.gmatch(past or '', '%-?%d+') do numbers[#numbers + 1] = tonumber(number) end
    if #numbers ~= 5 then return -1, -1, 0, 0, -1 end
    return unpack(numbers)
  end

  -- Count the tokens of a request that the ledger does not have yet. count is its output tokens. sums are those of its
  -- account, if they are known.
  function ledger.count_tokens(request, count, sums)
    sums = sums or sums_of(request)
    local prompt, cached, kind = string.match(request.used or '', '^(%d+) (%d+)(.*)$')
    local billed_prompt, billed_output = -1, -1
    if request.past then
      local num_claims, num_before
      billed_prompt, billed_output, num_claims, num_before = ledger.read_past(request.past)
      if num_claims > 0 then add(sums, 'recomputed', num_claims * (prompt or 0) + num_before) end
    end
    if count > billed_output then add(sums, 'output', count - math.max(0, billed_output)) end
    if not prompt or request.account and string.find(request.account, '\n1$') then return end
    local num_new = math.max(0, prompt - math.max(0, billed_prompt))
    add(sums, kind == 'e' and 'embedding' or 'prompt', num_new)
    if billed_prompt >= 0 then return end
    if cached ~= '0' then add(sums, 'cached', math.min(cached, num_new)) end
    for _ in string.gmatch(request.images or '', '%S+') do add(sums, 'images', 1) end
  end

  -- Count the end of a request. One that delivered nothing, because it did not finish, used nothing.
  function ledger.count_end(request, state)
    local count, sums = tonumber(request.count), sums_of(request)
    add(sums, state, 1)
    if count > 0 or state == 'finished' then ledger.count_tokens(request, count, sums) end
  end

  -- Return the sums of a value; false if there is none, or if something other than the scripts has written it.
  local function decode(value)
    local is_read, sums = pcall(cmsgpack.unpack, value or '')
    if not value or not is_read or type(sums) ~= 'table' or #sums ~= NUM_SUMS then return false end
    for i = 1, NUM_SUMS do
      if type(sums[i]) ~= 'number' then return false end
    end
    return sums
  end

  local function read(key, name)
    local value = attempt('HGET', key, name)
    if value == nil then redis.call('DEL', key) end
    return decode(value)
  end

  local function sum_up(whole, sums)
    whole = whole or {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}
    for place, number in pairs(sums) do whole[place] = whole[place] + number end
    return cmsgpack.pack(whole)
  end

  local function add_to(key, name, sums, ttl_s)
    local whole = read(key, name)
    if not whole then
      local num_fields = redis.call('HLEN', key)
      for _, shared in ipairs({{MAX_ACCOUNTS, string.match(name, '^[^\n]*') .. '\n*\n*'}, {MAX_TENANTS, '*\n*\n*'}}) do
        if not whole and num_fields >= shared[1] then
          name = shared[2]
          whole = read(key, name)
        end
      end
    end
    redis.call('HSET', key, name, sum_up(whole, sums))
    if not whole then redis.call('EXPIRE', key, ttl_s) end
  end

  -- Move the sums of the open hour to its hashes.
  function ledger.close_hour(prefix)
    local open, now_s = prefix .. 'ledger:open', math.floor(now_ms() / 1000)
    local flat = attempt('HGETALL', open) or {}
    redis.call('DEL', open)
    local at = now_s
    for i = 1, #flat, 2 do
      if flat[i] == 'start' then at = whole(flat[i + 1]) or now_s end
    end
    for i = 1, #flat, 2 do
      local sums = decode(flat[i + 1])
      for _, step in ipairs(sums and string.find(flat[i], '\n', 1, true) and STEPS or {}) do
        local start = at - at % step[1]
        add_to(string.format('%sledger:%d:%d', prefix, step[1], start), flat[i], sums, start + step[1] + step[2] - now_s)
      end
    end
  end

  -- Return the amount of a budget that its tenant or key has used since a time, by the days of this ledger.
  function ledger.spent_since(prefix, name, budget, start)
    local tenant, key_name = string.match(name, '^([^\n]*)\n([^\n]*)')
    local amount, now_s, step_s = 0, math.floor(now_ms() / 1000), STEPS[2][1]
    for day = start, now_s, step_s do
      local flat = attempt('HGETALL', string.format('%sledger:%d:%d', prefix, step_s, day)) or {}
      for i = 1, #flat, 2 do
        local owner, owner_key = string.match(flat[i], '^([^\n]*)\n([^\n]*)')
        local sums = owner == tenant and (key_name == '' or key_name == owner_key)
          and read(string.format('%sledger:%d:%d', prefix, step_s, day), flat[i])
        if sums then amount = amount + budgets.amount(budget, sums, SUMS) end
      end
    end
    return amount
  end

  -- Write what was counted in this call, and spend it.
  function ledger.write(prefix)
    if not unwritten then return end
    local open, now_s = prefix .. 'ledger:open', math.floor(now_ms() / 1000)
    local start = string.format('%d', now_s - now_s % STEPS[1][1])
    for name, sums in pairs(unwritten) do
      local values = attempt('HMGET', open, 'start', name) or {}
      local whole = decode(values[2])
      if values[1] ~= start or not whole and redis.call('HLEN', open) > MAX_OPEN then
        ledger.close_hour(prefix)
        whole = false
      end
      redis.call('HSET', open, 'start', start, name, sum_up(whole, sums))
    end
    for name, sums in pairs(budgets.exist(prefix) and unwritten or {}) do
      local tenant, account = string.match(name, '^([^\n]*)\n(.*)$')
      budgets.spend(prefix, tenant, account, sums, SUMS)
    end
    unwritten = nil
  end
end

setmetatable(ledger, {__index = function(_, name)
  open_ledger()
  return rawget(ledger, name)
end})
