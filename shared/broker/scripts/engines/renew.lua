-- uses: lib
-- Renew an engine's lease, and check the claims that the engine believes it holds.
-- KEYS: leases. ARGV: prefix, engine, lease_ttl_ms, then for each claim: id, epoch.
-- Returns the ids of stale claims: the requests moved while the engine seemed dead, or were cancelled.
local prefix, engine, stale = ARGV[1], ARGV[2], {}
marks.set_lease(prefix, 'leases', engine, tonumber(ARGV[3]))
for i = 4, #ARGV, 2 do
  local epoch, state = values_of(prefix .. 'request:' .. ARGV[i], 'epoch', 'state')
  if epoch ~= ARGV[i + 1] or state ~= 'claimed' then stale[#stale + 1] = ARGV[i] end
end
return stale
