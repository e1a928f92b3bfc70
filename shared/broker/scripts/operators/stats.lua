-- uses: measures, homes
-- Return the statistics of a model's queue. KEYS: leases. ARGV: prefix. Returns a msgpack array: its measurements
-- (measures.lua), mean output tokens, the default band, the number of requests that await input; the number of requests
-- that were warm for an engine, and of those that went to it; and what may serve it (readiness of homes.lua).
local prefix = ARGV[1]
local sums = fields(prefix .. 'queue', 'mean_output', 'num_awaiting', 'warm', 'warm_kept')
return cmsgpack.pack({measures(prefix), count_of(sums.mean_output), queue_policy(prefix).default_band,
  count_of(sums.num_awaiting), count_of(sums.warm), count_of(sums.warm_kept), readiness(prefix)})
