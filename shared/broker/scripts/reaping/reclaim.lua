-- uses: death
-- Reclaim the requests of a dead engine. The caller knows that it is dead: it is its parent, or has killed it. KEYS:
-- leases. ARGV: prefix, engine, is_external, max_deliveries, cause. Returns {queued again, parked}. A second call has
-- no effect.
return reclaim_engine(ARGV[1], ARGV[2], ARGV[3] == '1', tonumber(ARGV[4]), ARGV[5])
