-- uses: clock
-- Used by all scripts of files and batches.
--
-- A batch is a hash:
--   spec                   JSON that never changes: tenant, input, endpoint, times
--   status                 see TRANSITIONS
--   NAME_at                time of this server, in seconds, of the change to status NAME
--   epoch, holder          how often its lease was claimed, and its last holder; only the holder may write
--   lease_ms               how long the last lease lasts
--   total, completed, failed    rows; model, usage, errors, output_file_id, error_file_id: as OpenAI's batch has them
--   event                  set from its end until that was reported (by a webhook)
-- The set "open" has its id, scored by the expiry of the lease in ms, from creation until its end was reported.

-- Transitions by a runner; cancel.lua does the others.
local TRANSITIONS = {
  validating = {in_progress = true, failed = true},
  in_progress = {finalizing = true, failed = true},
  finalizing = {completed = true, expired = true},
  cancelling = {cancelled = true},
}
local ENDS = {failed = true, completed = true, expired = true, cancelled = true}

local function set_status(key, status)
  redis.call('HSET', key, 'status', status, status .. '_at', math.floor(now_ms() / 1000))
end

-- Create a file. Its contents are no longer garbage, or only after it expires; with an empty time it never does.
local function put_file(key, list, garbage, id, record, created_ms, expires_ms)
  redis.call('SET', key, record)
  redis.call('ZADD', list, created_ms, id)
  if expires_ms == '' then
    redis.call('ZREM', garbage, id)
  else
    redis.call('PEXPIREAT', key, expires_ms)
    redis.call('ZADD', garbage, expires_ms, id)
  end
end
