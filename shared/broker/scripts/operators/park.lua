-- uses: life
-- Park a claimed request that no engine can run. KEYS: leases. ARGV: prefix, id, epoch, cause, code, message.
-- Its caller gets the error. Returns 1, or 0 if the claim is stale.
local prefix, id = ARGV[1], ARGV[2]
local request = fields_of(prefix .. 'request:' .. id, 'epoch', 'state')
if request.epoch ~= ARGV[3] or request.state ~= 'claimed' then return 0 end
park(prefix, id, ARGV[4], 'error', ARGV[5], ARGV[6])
return 1
