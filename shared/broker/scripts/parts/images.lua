-- uses: lib
-- Images of requests have keys of their own, once each, while any request needs them. images are digests separated by
-- spaces. user is a request's id, or parked_user of it if the request is in the dead letter.
local function parked_user(id) return '{parked}' .. id end

local function hold_images(prefix, user, images)
  for digest in string.gmatch(images, '%S+') do redis.call('SADD', prefix .. 'image_users:' .. digest, user) end
end

local function release_images(prefix, user, images)
  for digest in string.gmatch(images, '%S+') do
    local users = prefix .. 'image_users:' .. digest
    attempt('SREM', users, user)
    if attempt('SCARD', users) == 0 then redis.call('DEL', prefix .. 'image:' .. digest) end
  end
end
