-- Shared by every script of files and batches, which this text is put in front of.
--
-- A batch is a hash:
--   spec                   JSON that never changes: whose it is, its input, endpoint, times
--   status                 see TRANSITIONS
--   NAME_at                seconds of this server's clock at which it came to the status NAME
--   epoch, holder          how often its lease was taken, and by whom last; only the holder may write
--   lease_ms               how long the lease lasts that was taken last
--   total, completed, failed    rows; model, usage, errors, output_file_id, error_file_id: as OpenAI's batch has them
--   event                  set from its end until that was told (the webhook)
-- It stands in "open", with the ms at which the lease ends, from its making until its end was told.

-- What a runner may do; cancel.lua does the rest.
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

-- Make a file known. Its contents are no garbage any more, or not before it expires (an empty time: never).
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
