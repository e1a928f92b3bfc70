-- Put before a script's text, which then runs under the simulator's clock: a local `redis` stands between it and the
-- server, and answers the few commands that know the time. The text itself is as it is.
--
-- The clock is the field now_us of the hash `virtual`, written by the simulator. So are the ids of stream entries, from
-- which arrival times come. What is to expire is noted in `expiries`, by its ms, and taken away by the simulator: the
-- server's own expiry runs by real time. What is published is no message but a part of the reply, since who waits for it
-- waits in virtual time; output, which nobody reads, is dropped.
local published = {}
local redis = (function(server)
  local prefix = ARGV[1]
  local virtual, expiries, output = prefix .. 'virtual', prefix .. 'expiries', prefix .. 'output:'
  local clock_us
  local function now_us()
    clock_us = clock_us or tonumber(server.call('HGET', virtual, 'now_us'))
    return clock_us
  end
  local function now_ms() return math.floor(now_us() / 1000) end
  local function expire_in(key, ms)
    if server.call('EXISTS', key) == 0 then return 0 end
    server.call('ZADD', expiries, string.format('%.0f', now_ms() + tonumber(ms)), key)
    return 1
  end

  local commands = {}
  function commands.TIME()
    return {string.format('%.0f', math.floor(now_us() / 1000000)), string.format('%.0f', now_us() % 1000000)}
  end
  function commands.XADD(call, key, id, ...)
    if id == '*' then id = string.format('%.0f-%.0f', now_ms(), server.call('HINCRBY', virtual, 'entries', 1)) end
    return call('XADD', key, id, ...)
  end
  function commands.SET(call, key, value, ...)
    local options, ttl_ms, given = {}, nil, {...}
    local i = 1
    while i <= #given do
      if given[i] == 'PX' then
        ttl_ms = given[i + 1]
        i = i + 1
      else
        options[#options + 1] = given[i]
      end
      i = i + 1
    end
    local reply = call('SET', key, value, unpack(options))
    if ttl_ms and reply then expire_in(key, ttl_ms) end
    return reply
  end
  function commands.PEXPIRE(_, key, ttl_ms) return expire_in(key, ttl_ms) end
  function commands.EXPIRE(_, key, ttl_s) return expire_in(key, tonumber(ttl_s) * 1000) end
  function commands.PTTL(_, key)
    if server.call('EXISTS', key) == 0 then return -2 end
    local at_ms = server.call('ZSCORE', expiries, key)
    return at_ms and tonumber(at_ms) - now_ms() or -1
  end
  function commands.PUBLISH(_, channel)
    if string.sub(channel, 1, #output) ~= output then published[#published + 1] = channel end
    return 0
  end

  local function through(call)
    return function(name, ...)
      local own = commands[name]
      if own then return own(call, ...) end
      return call(name, ...)
    end
  end
  return setmetatable({call = through(server.call), pcall = through(server.pcall)}, {__index = server})
end)(redis)
