-- uses: lib
-- The ledger: what each tenant has used, by API key and adapter.
--
-- ledger:STEP:START is a hash of the STEP seconds from START (Unix time) on. A field is TENANT, KEY and ADAPTER, each
-- on a line; its value is a msgpack array of sums, in the order of SUMS (shared/broker/ledger.py has the same). A request
-- is counted in the script that ends it, and a resumable one also at the end of each segment. So each token counts once.
--
-- Fields of a request:
--   account          KEY and ADAPTER; absent if it has neither
--   sibling          set if another answer to the same prompt counts the prompt
--   used             prompt tokens, cached ones of these, and "e" after them if the prompt was pooled, by its engine;
--                    absent before its first token
--   billed           prompt and output tokens of its segments that the ledger has already
--   died             output tokens when its engine died, until it is claimed again
--   again            claims after a death of an engine, and the sum of the output tokens then
local ledger = {}
do
  local STEPS = {{3600, 90 * 86400}, {86400, 3 * 366 * 86400}} -- seconds, and how long they are retained
  -- Beyond this many fields in a hash, new ones share one per tenant, and then one for all.
  local MAX_ACCOUNTS, MAX_TENANTS = 10000, 100000
  local SUMS = {finished = 1, cancelled = 2, expired = 3, failed = 4, parked = 5, prompt = 6, cached = 7, output = 8,
    embedding = 9, recomputed = 10, images = 11}
  local NUM_SUMS = 11
  local unwritten -- field -> sums; nil without any

  local function sums_of(request)
    local name = request.tenant .. '\n' .. (request.account or '\n')
    unwritten = unwritten or {}
    local sums = unwritten[name]
    if not sums then
      sums = {}
      for i = 1, NUM_SUMS do sums[i] = 0 end
      unwritten[name] = sums
    end
    return sums
  end

  -- Count the tokens of a request that the ledger does not have yet. count is its output tokens.
  function ledger.count_tokens(request, count)
    local sums = sums_of(request)
    local function add(name, number) sums[SUMS[name]] = sums[SUMS[name]] + number end
    local prompt, cached, kind = string.match(request.used or '', '^(%d+) (%d+)(.*)$')
    local billed_prompt, billed_output = string.match(request.billed or '', '^(%d+) (%d+)$')
    local num_claims, num_before = string.match(request.again or '', '^(%d+) (%d+)$')
    add('output', math.max(0, count - tonumber(billed_output or 0)))
    if num_claims then add('recomputed', num_claims * (prompt or 0) + num_before) end
    if not prompt or request.sibling then return end
    local num_new = math.max(0, prompt - (billed_prompt or 0))
    add(kind == 'e' and 'embedding' or 'prompt', num_new)
    if billed_prompt then return end
    add('cached', math.min(cached, num_new))
    for _ in string.gmatch(request.images or '', '%S+') do add('images', 1) end
  end

  -- Count the end of a request. One that delivered nothing, because it did not finish, used nothing.
  function ledger.count_end(request, state)
    local sums, count = sums_of(request), tonumber(request.count)
    sums[SUMS[state]] = sums[SUMS[state]] + 1
    if count > 0 or state == 'finished' then ledger.count_tokens(request, count) end
  end

  -- Return the sums of a field, false if it has none. Something other than the scripts has written what cannot be read.
  local function read(key, name)
    local value = attempt('HGET', key, name)
    if value == nil then redis.call('DEL', key) end
    local is_read, sums = pcall(cmsgpack.unpack, value or '')
    if not value or not is_read or type(sums) ~= 'table' then return false end
    for i = 1, NUM_SUMS do
      if type(sums[i] or 0) ~= 'number' then return false end
    end
    return sums
  end

  local function add_to(key, name, sums)
    local before = read(key, name)
    if not before then
      local num_fields = redis.call('HLEN', key)
      for _, shared in ipairs({{MAX_ACCOUNTS, string.match(name, '^[^\n]*') .. '\n*\n*'}, {MAX_TENANTS, '*\n*\n*'}}) do
        if not before and num_fields >= shared[1] then
          name = shared[2]
          before = read(key, name)
        end
      end
    end
    local after = {}
    for i = 1, NUM_SUMS do after[i] = (before and before[i] or 0) + sums[i] end
    redis.call('HSET', key, name, cmsgpack.pack(after))
    return before
  end

  -- Write what was counted in this call.
  function ledger.write(prefix)
    if not unwritten then return end
    local now_s = math.floor(now_ms() / 1000)
    for _, step in ipairs(STEPS) do
      local start = now_s - now_s % step[1]
      local key = string.format('%sledger:%d:%d', prefix, step[1], start)
      for name, sums in pairs(unwritten) do
        if not add_to(key, name, sums) then redis.call('EXPIRE', key, start + step[1] + step[2] - now_s) end
      end
    end
    unwritten = nil
  end
end
