-- Shared by every script, which this text is put in front of.
--
-- A request is a hash: state, epoch, count (output tokens logged), attempts, engine, entry (its id in the lane),
-- ttl (ms that hash and log outlive its end), detached. Its log and its channel get the same records, in one script.
-- States: queued -> claimed -> finished | failed | cancelled; claimed -> queued again when it is handed back.
-- expired and parked join with deadlines and the dead letter.

local GROUP = 'workers'

-- Append a record to the log and publish it. count is the number of output tokens after it.
local function emit(prefix, key, id, record, count)
  redis.call('RPUSH', prefix .. 'log:' .. id, record)
  redis.call('HSET', key, 'count', count)
  redis.call('PUBLISH', prefix .. 'output:' .. id, record)
end

-- Give a request its last state: the entry leaves the lane, hash and log begin to expire.
local function close_request(prefix, key, id, state, entry, ttl)
  redis.call('HSET', key, 'state', state)
  redis.call('XACK', prefix .. 'lane', GROUP, entry)
  redis.call('XDEL', prefix .. 'lane', entry)
  redis.call('PEXPIRE', key, ttl)
  redis.call('PEXPIRE', prefix .. 'log:' .. id, ttl)
end
