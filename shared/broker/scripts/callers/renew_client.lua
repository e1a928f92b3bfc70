-- Renew a client's lease, which its interactive requests live by. KEYS: leases. ARGV: prefix, client, ttl_ms.
redis.call('ZADD', ARGV[1] .. 'clients', now_ms() + tonumber(ARGV[3]), ARGV[2])
return 1
