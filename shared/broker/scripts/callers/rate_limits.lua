-- uses: tenants
-- Return the quotas per minute of a tenant and what is left of them. KEYS: leases. ARGV: prefix, tenant. Returns nil
-- without such quotas, else for requests and tokens: limit (0 without one), and how many more may come now; and ms until
-- nothing counts any more. Waiting requests count as used.
local prefix, tenant = ARGV[1], ARGV[2]
local policy = tenant_policy(prefix, tenant)
if not has_rate_quota(policy) then return nil end
local requests, tokens = used(prefix, tenant)
local depth, waiting_tokens = waiting(prefix, prefix .. 'tenant:' .. tenant)
local last = whole(fields(prefix .. 'usage:' .. tenant, 'last').last)
local reset_ms = requests > 0 and last and math.max(0, (last + WINDOW_S + 1) * 1000 - now_ms()) or 0
local function state(limit, num_used)
  local most = limit_of(limit)
  if most == math.huge then return 0, 0 end
  return most, math.max(0, most - num_used)
end
local most_requests, requests_left = state(policy.requests_per_minute, requests + depth)
local most_tokens, tokens_left = state(policy.tokens_per_minute, tokens + waiting_tokens)
return {most_requests, requests_left, most_tokens, tokens_left, reset_ms}
