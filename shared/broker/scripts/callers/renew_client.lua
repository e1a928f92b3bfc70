-- Renew a client's lease, which its interactive requests live by. KEYS: leases. ARGV: prefix, client, ttl_ms.
marks.set_lease(ARGV[1], 'clients', ARGV[2], tonumber(ARGV[3]))
return 1
