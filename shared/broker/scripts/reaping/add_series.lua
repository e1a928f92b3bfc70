-- uses: series
-- Add the counts of a process since its last call. KEYS: leases. ARGV: prefix, writer, number of the call, a msgpack
-- array of names and amounts, one of tenants' kinds, names and amounts. Returns 1, or 0 for a repeated call.
local prefix = ARGV[1]
local last = prefix .. 'series_writer:' .. ARGV[2]
local WRITER_TTL_MS = 3600000
local before = tonumber(attempt('GET', last) or 0) or 0
if tonumber(ARGV[3]) <= before then return 0 end
redis.call('SET', last, ARGV[3], 'PX', WRITER_TTL_MS)
add_to_series(prefix, cmsgpack.unpack(ARGV[4]), cmsgpack.unpack(ARGV[5]))
return 1
