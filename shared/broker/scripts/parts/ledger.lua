-- uses: budgets
-- The ledger: what each tenant has used, by API key and adapter.
--
-- ledger:STEP:START is a hash of the STEP seconds from START (Unix time) on. A field is TENANT, KEY and ADAPTER, each on
-- a line; its value is a msgpack array of sums, in the order of SUMS (shared/broker/ledger.py has the same). A request is
-- counted in the script that ends it, and a resumable one also at the end of each segment. So each token counts once.
-- Such a script appends a row to ledger:rows, a list, which costs one command for all ends of a call. Every MAX_ROWS
-- rows, and before the ledger is read, all rows are added to the hashes of their hours and days, in one script.
--
-- A row is lines: output tokens, a space and used; a time less than 100 s before, in the same hour; state (empty at the
-- end of a segment), tenant, past, images and account. Absent fields are empty. Rows of a tenant differ mostly in the
-- first line, so the others are read once. Fields of a request:
--   account          KEY and ADAPTER, and a line "1" if another answer to the same prompt counts the prompt; absent if it
--                    has none of these
--   used             prompt tokens, cached ones of these, and "e" after them if the prompt was pooled, by its engine;
--                    absent before its first token
--   past             prompt and output tokens of its segments that the ledger has already, -1 before the first has ended;
--                    claims after a death of an engine, and the sum of the output tokens then; and output tokens when its
--                    engine died, until it is claimed again, else -1. Absent for most requests
local ledger -- the functions below, nil until they are needed

-- Create these functions at their first use, because most calls of scripts need none.
local function open_ledger()
  if ledger then return ledger end
  local at, rows, ended, books -- rows until write, ended requests until spend

  -- Count the end of a request with these fields, or of a segment (state is '' then). Call write and settle_ends, or
  -- spend, next.
  local function count(request, state)
    now_us()
    at = at or '\n' .. string.sub(marks.seconds, 1, -3) .. '00\n' -- rows of one time are added up faster
    local row = request.count .. ' ' .. (request.used or '') .. at .. state .. '\n' .. request.tenant .. '\n'
      .. (request.past or '') .. '\n' .. (request.images or '') .. '\n' .. (request.account or '')
    if rows then rows[#rows + 1] = row else rows = {row} end
    if ended then ended[#ended + 1] = request else ended = {request} end
  end

  -- Return the functions for rows that were written.
  local function open_books()
    if books then return books end
    books = {}
    local STEPS = {{3600, 90 * 86400}, {86400, 3 * 366 * 86400}} -- seconds, and how long they are retained
    -- Beyond this many fields in a hash, new ones share one per tenant, and then one for all.
    local MAX_ACCOUNTS, MAX_TENANTS = 10000, 100000
    local SUMS = {finished = 1, cancelled = 2, expired = 3, failed = 4, parked = 5, prompt = 6, cached = 7, output = 8,
      embedding = 9, recomputed = 10, images = 11}
    local NUM_SUMS, PROMPT, CACHED, OUTPUT = 11, SUMS.prompt, SUMS.cached, SUMS.output
    local FIRST, LINES = '^(%d+) (%d*) ?(%d*)([^\n]*)\n()', '^(%d+)\n(%l*)\n([^\n]*)\n([^\n]*)\n([^\n]*)\n(.*)$'

    local function add(sums, name, number)
      local place = SUMS[name]
      sums[place] = sums[place] + number
    end

    -- Return the numbers of the field past.
    function books.read_past(past)
      local numbers = {}
      for number in string.gmatch(past or '', '%-?%d+') do numbers[#numbers + 1] = tonumber(number) end
      if #numbers ~= 5 then return -1, -1, 0, 0, -1 end
      return unpack(numbers)
    end

    -- Add a request's tokens that the ledger does not have yet, of a pooled one if kind is "e". owner is as in owner_of.
    local function add_tokens(owner, count, prompt, cached, kind)
      local sums = owner.sums
      local billed_prompt, billed_output, num_claims, num_before = books.read_past(owner.past)
      if num_claims > 0 then add(sums, 'recomputed', num_claims * (prompt or 0) + num_before) end
      if count > billed_output then add(sums, 'output', count - math.max(0, billed_output)) end
      if not prompt or owner.is_sibling then return end
      local num_new = math.max(0, prompt - math.max(0, billed_prompt))
      add(sums, kind == 'e' and 'embedding' or 'prompt', num_new)
      if billed_prompt >= 0 then return end
      add(sums, 'cached', math.min(cached, num_new))
      for _ in string.gmatch(owner.images, '%S+') do add(sums, 'images', 1) end
    end

    -- Return what the other lines of a row say, with the sums of its hour and account in accounts: start of an hour -> field
    -- -> sums. nil if something other than the scripts has written the row.
    local function owner_of(accounts, lines)
      local hour, state, tenant, past, images, account = string.match(lines, LINES)
      if not hour then return nil end
      local name = tenant .. '\n' .. (string.match(account, '^[^\n]*\n[^\n]*') or '\n')
      hour = hour - hour % STEPS[1][1]
      accounts[hour] = accounts[hour] or {}
      accounts[hour][name] = accounts[hour][name] or {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}
      local is_sibling = string.find(account, '\n1$') ~= nil
      return {sums = accounts[hour][name], end_place = SUMS[state], counts_empty = state == 'finished' or state == '',
        past = past, images = images, is_sibling = is_sibling, is_plain = past == '' and images == '' and not is_sibling}
    end

    -- Return the accounts of these rows. A request that delivered nothing, because it did not finish, used nothing.
    local function accounts_of(rows)
      local accounts, owners = {}, {}
      for i = 1, #rows do
        local row = rows[i]
        local count, prompt, cached, kind, stop = string.match(row, FIRST)
        local lines = stop and string.sub(row, stop)
        local owner = lines and (owners[lines] or owner_of(accounts, lines))
        if owner then
          owners[lines] = owner
          local sums, end_place = owner.sums, owner.end_place
          if end_place then sums[end_place] = sums[end_place] + 1 end
          local is_known = prompt ~= '' and cached ~= ''
          if count == '0' and not owner.counts_empty then
            -- nothing was delivered
          elseif owner.is_plain and is_known and kind == '' then -- most requests
            prompt = prompt + 0 -- a number, converted once
            sums[OUTPUT], sums[PROMPT] = sums[OUTPUT] + count, sums[PROMPT] + prompt
            if cached ~= '0' then
              cached = cached + 0
              sums[CACHED] = sums[CACHED] + (cached < prompt and cached or prompt)
            end
          else
            add_tokens(owner, tonumber(count), is_known and prompt, cached, kind)
          end
        end
      end
      return accounts
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
      local is_new = not whole
      whole = whole or {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}
      for place, number in ipairs(sums) do whole[place] = whole[place] + number end
      redis.call('HSET', key, name, cmsgpack.pack(whole))
      if is_new then redis.call('EXPIRE', key, ttl_s) end
    end

    -- Add all rows to the hashes of their hours and days, and to what was spent of budgets.
    function books.close_rows(prefix)
      local key = prefix .. 'ledger:rows'
      local rows = attempt('LRANGE', key, 0, -1) or {}
      redis.call('DEL', key)
      local has_budgets = redis.call('HGET', prefix .. 'queue', 'budgets')
      for hour, sums_of in pairs(accounts_of(rows)) do
        for name, sums in pairs(sums_of) do
          for _, step in ipairs(STEPS) do
            local start = hour - hour % step[1]
            add_to(string.format('%sledger:%d:%d', prefix, step[1], start), name, sums, start + step[1] + step[2] - now_s())
          end
          if has_budgets then
            local tenant, key_name = string.match(name, '^([^\n]*)\n([^\n]*)')
            open_budgets().spend(prefix, tenant, key_name, hour, sums, SUMS)
          end
        end
      end
    end

    -- Return the amount of a budget that its tenant or key has used since a time, by the days of this ledger.
    function books.spent_since(prefix, name, budget, start)
      local tenant, key_name = string.match(name, '^([^\n]*)\n([^\n]*)')
      local amount, step_s = 0, STEPS[2][1]
      for day = start, now_s(), step_s do
        local flat = attempt('HGETALL', string.format('%sledger:%d:%d', prefix, step_s, day)) or {}
        for i = 1, #flat, 2 do
          local owner, owner_key = string.match(flat[i], '^([^\n]*)\n([^\n]*)')
          local sums = owner == tenant and (key_name == '' or key_name == owner_key) and decode(flat[i + 1])
          if sums then amount = amount + open_budgets().amount(budget, sums, SUMS) end
        end
      end
      return amount
    end
    return books
  end

  -- Write what was counted in this call.
  local function write(prefix)
    if not rows then return end
    local MAX_ROWS, key = 256, prefix .. 'ledger:rows'
    local num_rows = attempt('RPUSH', key, unpack(rows))
    if not num_rows then
      redis.call('DEL', key)
      num_rows = redis.call('RPUSH', key, unpack(rows))
    end
    rows = nil
    if num_rows >= MAX_ROWS then open_books().close_rows(prefix) end
  end

  -- Spend what was written in this call, if there are budgets: decrease the tokens that each tenant may use.
  local function spend(prefix)
    local spending, tokens = ended, {}
    ended = nil
    if spending and marks.budgets == nil then marks.budgets = redis.call('HGET', prefix .. 'queue', 'budgets') end
    if not (spending and marks.budgets) then return end
    for i = 1, #spending do
      local request = spending[i]
      local num_tokens = request.count + (string.match(request.used or '', '^%d+') or 0)
      if num_tokens > 0 then tokens[request.tenant] = (tokens[request.tenant] or 0) + num_tokens end
    end
    for tenant, num_tokens in pairs(tokens) do
      -- As text, because Redis formats numbers of scripts with 17 digits.
      local left = redis.pcall('HINCRBY', prefix .. 'budget_left', tenant, string.format('-%d', num_tokens))
      if type(left) ~= 'number' or left < 0 then
        open_books().close_rows(prefix)
        open_budgets().allow(prefix, tenant)
      end
    end
  end

  ledger = {count = count, write = write, spend = spend, books = open_books}
  return ledger
end
