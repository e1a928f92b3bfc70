-- uses: lib
-- Create an uploaded file, unless it exists. KEYS: file, files of its tenant, garbage. ARGV: id, record, created_ms,
-- expires_ms. Returns its record.
local existing = redis.call('GET', KEYS[1])
if existing then return existing end
put_file(KEYS[1], KEYS[2], KEYS[3], ARGV[1], ARGV[2], ARGV[3], ARGV[4])
return ARGV[2]
