-- A model's queue as a whole. KEYS: leases. ARGV: prefix. Returns a msgpack array: its measures (measures.lua), mean output
-- tokens, the default band, how many requests await input; how many had an engine that was
-- warm for them, and how many of those went to it.
local prefix = ARGV[1]
local sums = fields(prefix .. 'queue', 'mean_output', 'num_awaiting', 'warm', 'warm_kept')
return cmsgpack.pack({measures(prefix), count_of(sums.mean_output), queue_policy(prefix).default_band,
  count_of(sums.num_awaiting), count_of(sums.warm), count_of(sums.warm_kept)})
