-- uses: ledger
-- Return a part of the ledger. KEYS: leases. ARGV: prefix, step, then the starts of steps. Returns the fields and values
-- of each step's hash.
local prefix, rows = ARGV[1], {}
open_ledger().books().close_rows(prefix)
for i = 3, #ARGV do rows[i - 2] = attempt('HGETALL', prefix .. 'ledger:' .. ARGV[2] .. ':' .. ARGV[i]) or {} end
return rows
