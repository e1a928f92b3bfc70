-- uses: lib
-- Request the cancellation of a batch; its runner reads it at the next renewal. KEYS: batch. Returns the status.
local status = redis.call('HGET', KEYS[1], 'status')
if status == 'validating' or status == 'in_progress' then
  set_status(KEYS[1], 'cancelling')
  return 'cancelling'
end
return status
