-- uses: homes
-- Return how much a model is needed, as msgpack. KEYS: leases. ARGV: prefix. Read once a second by each home, so its
-- cost depends on no length. A list:
--   the time (ms); whether the queue is paused; tokens that wait in lanes; requests that wait after a claim; running
--   ones; earliest deadline of a waiting request (ms, 0 without one);
--   for each band with a request that an engine could claim: name, requests in its lanes, ms since when the oldest
--   waits; engines that claim: their number, sequences, held sequences; ids of devices with a grant; homes (homes.lua).
local prefix, queue = ARGV[1], ARGV[1] .. 'queue'
local MAX_DEADLINES = 16
local function earliest_deadline()
  local due = redis.call('ZRANGE', prefix .. 'deadlines', 0, MAX_DEADLINES - 1, 'WITHSCORES')
  for i = 1, #due, 2 do
    if fields_of(prefix .. 'request:' .. due[i], 'state').state == 'queued' then return tonumber(due[i + 1]) end
  end
  return 0
end

drop_expired_homes(prefix)
local bands = {}
for band, at in pairs(oldest_by_band(prefix)) do
  bands[#bands + 1] = {band, count_of((waiting_in(queue, band))), at}
end
local _, tokens = waiting(prefix, queue)
local num_returned = redis.call('LLEN', prefix .. 'returned') + redis.call('LLEN', prefix .. 'suspects')
local num_started = count_of(redis.call('HGET', queue, 'num_started'))
local engines = capacity_of_others(prefix, '') or {num = 0, seqs = 0, held_seqs = 0}
return cmsgpack.pack({now_ms(), redis.call('HEXISTS', queue, 'paused'), tokens, num_returned,
  math.max(0, num_started - num_returned), earliest_deadline(), bands, {engines.num, engines.seqs, engines.held_seqs},
  redis.call('ZRANGE', prefix .. 'grants', 0, MAX_HOMES - 1), live_homes(prefix)})
