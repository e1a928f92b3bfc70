-- uses: life
-- Delete a parked request, and the images that no other request needs. KEYS: leases. ARGV: prefix, id. Returns 1, or 0
-- if no such request is parked.
local prefix, id = ARGV[1], ARGV[2]
local parked = prefix .. 'parked:' .. id
local images = fields_of(parked, 'images').images
if images then release_images(prefix, parked_user(id), images) end
redis.call('ZREM', prefix .. 'dead', id)
return redis.call('DEL', parked)
