-- uses: lib
-- Write to a batch as its holder, and renew the lease. KEYS: batch, open, garbage, files of its tenant, then a key for
-- each file. ARGV: id, holder, ttl_ms (0 releases the lease), new status (or ''), clear_ms, number of fields, each
-- field's name and value, then id, record, created_ms and expires_ms of each file.
-- When a batch ends, its files are created, its working folder becomes garbage after clear_ms, and its event is due.
-- Returns {'stale'}, or {'refused' or 'done', status, now_ms}: nothing was written if it was stale or refused.
local key, id, target = KEYS[1], ARGV[1], ARGV[4]
local now = now_ms()
local state = redis.call('HMGET', key, 'status', 'holder')
if state[2] ~= ARGV[2] then return {'stale'} end
local status = state[1]
-- A repeated write finds the batch in the new status already.
local is_new = target ~= '' and target ~= status
if is_new and not (TRANSITIONS[status] or {})[target] then return {'refused', status, now} end
if redis.call('ZSCORE', KEYS[2], id) then
  local ttl_ms = tonumber(ARGV[3])
  redis.call('ZADD', KEYS[2], ttl_ms > 0 and now + ttl_ms or 0, id)
  if ttl_ms == 0 then redis.call('HSET', key, 'holder', '') end
end
local at = 7
for _ = 1, tonumber(ARGV[6]) do
  -- Counts of a renewal that was in flight when the batch ended are outdated.
  if is_new or not ENDS[status] then redis.call('HSET', key, ARGV[at], ARGV[at + 1]) end
  at = at + 2
end
for k = 5, #KEYS do
  put_file(KEYS[k], KEYS[4], KEYS[3], ARGV[at], ARGV[at + 1], ARGV[at + 2], ARGV[at + 3])
  at = at + 4
end
if is_new then
  set_status(key, target)
  status = target
  if ENDS[target] then
    redis.call('HSET', key, 'event', 'due')
    redis.call('ZADD', KEYS[3], now + tonumber(ARGV[5]), id)
  end
end
return {'done', status, now}
