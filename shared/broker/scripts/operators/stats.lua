-- A model's queue as a whole. KEYS: leases. ARGV: prefix. Returns a msgpack array: ms of now, ms since when it is paused
-- (0 if not), requests that were claimed and have not ended, those of them that wait in "returned" and "suspects", the
-- measured rate (ms, requests, tokens), mean output tokens, the default band, and for each band: its name, requests and
-- tokens that wait, tenants that may be claimed from, and the arrival (ms) of the oldest of their requests (0 without
-- one); how many requests await input; how many had an engine that was warm for them, and how many of those went to it.
-- What waits of a tenant that is over a quota is counted, but not in the oldest.
local prefix, bands = ARGV[1], {}
local queue = prefix .. 'queue'
local sums = fields(queue, 'paused', 'num_started', 'rate_ms', 'rate_requests', 'rate_tokens', 'mean_output',
  'num_awaiting', 'warm', 'warm_kept')
for i, band in ipairs(queue_policy(prefix).bands) do
  local depth, tokens = waiting_in(queue, band)
  local head = redis.call('ZRANGE', prefix .. 'heads:' .. band, 0, 0, 'WITHSCORES')[2]
  bands[i] = {band, count_of(depth), count_of(tokens), redis.call('ZCARD', prefix .. 'ready:' .. band),
    tonumber(head or 0)}
end
return cmsgpack.pack({now_ms(), count_of(sums.paused), count_of(sums.num_started),
  redis.call('LLEN', prefix .. 'returned') + redis.call('LLEN', prefix .. 'suspects'),
  count_of(sums.rate_ms), count_of(sums.rate_requests), count_of(sums.rate_tokens), count_of(sums.mean_output),
  queue_policy(prefix).default_band, bands, count_of(sums.num_awaiting), count_of(sums.warm),
  count_of(sums.warm_kept)})
