-- uses: lib
-- Create an uploaded file. KEYS: file, files of its tenant, garbage. ARGV: id, record, created_ms, expires_ms.
put_file(KEYS[1], KEYS[2], KEYS[3], ARGV[1], ARGV[2], ARGV[3], ARGV[4])
return 1
