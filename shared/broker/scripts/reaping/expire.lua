-- End what is past its deadline. KEYS: leases. ARGV: prefix, most, grace_ms: for what runs, whose engine ends it in time
-- if it can. Returns how many. Anyone may call it: a supervisor does all the time, and a client whose request is due.
return expire_due(ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]))
