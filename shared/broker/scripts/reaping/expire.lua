-- uses: life
-- End requests that are past their deadline. KEYS: leases. ARGV: prefix, most, grace_ms: for running requests, which
-- their engine ends in time if it can. Returns how many. A supervisor calls it continuously, and a client when its
-- request is due.
return expire_due(ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]))
