-- uses: lib
-- Renew a client's lease, on which its interactive requests depend. KEYS: leases. ARGV: prefix, client, ttl_ms.
marks.set_lease(ARGV[1], 'clients', ARGV[2], tonumber(ARGV[3]))
return 1
