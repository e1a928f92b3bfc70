"""The only place that spells a Redis key, with each key's type, life time and reason.

All keys of a model carry the hash tag ``{model}``, so that every script touches one slot of a cluster. Files and
batches of a namespace have one slot, too: a batch's end makes its files in the same script.
With shards (``shards/``) keys with a model's tag are on the model's shard, and all others on the home Redis.
A model may have several partitions (``partitions/``), each with keys of its own: {MODEL} is the first of them, and the
only one of most models, {MODEL#1} the second. Each is placed on shards, and moved, as a model is.
A namespace separates deployments (and tests) on one Redis.

A database of Redis has its own keys, but channels belong to the whole server. So each connection writes the number of
its database into the names of channels (``channel_in``): ``NS:{MODEL}/3:wake`` in database 3. Database 0 has none.

    key                                    type      lives
    NS:models                              hash      for ever; model name -> ModelCard
    NS:forgotten_models                    set       models that were forgotten, whose ledgers remain; for ever
    NS:budgets                             hash      tenant, key and period -> Budget; until removed; "" -> version
    NS:budgets:ended                       string    version of no budgets that all models know; expires
    NS:budgets:synced                      string    that the budgets of all models were just compared; expires
    NS:engines                             set       engine ids; dead ones are dropped by whoever lists them
    NS:engine:ENGINE                       string    heartbeat, expires after heartbeat_ttl_s
    NS:devices                             set       ids of devices that several models share; as engines
    NS:device:DEVICE                       string    DeviceRecord of one, expires 3 s after its last write
    NS:processes                           set       ids of processes beside engines; as engines
    NS:process:PROCESS                     string    ProcessRecord of one, expires 16 s after its last write
    NS:api_keys                            hash      id -> ApiKey of the gateway; until revoked
    NS:operator_keys                       hash      id -> OperatorKey of the dashboard; until revoked
    NS:dashboard_secret                    string    what signs the sessions of dashboards; for ever
    NS:audit                               stream    AuditEntry of each change by an operator; the last 10,000
    NS:audit:apps                          stream    the same for apps, which may not write the former
    NS:absent                              none      never written: named by commands that are only tried
    NS:placements                          hash      model -> name of the shard that holds its keys; for ever
    NS:moves                               hash      model -> unfinished ShardMove
    NS:layouts                             hash      model -> Layout of its partitions, where it has several; for ever
    NS:worker:WORKER:commands              channel   drain and stop, to a supervisor
    NS:jobs                                zset      arq's queue of our jobs; arq writes a job to arq:job:NS:…
    NS:jobs:health-check                   string    that a process runs our jobs; arq lets it expire
    NS:jobs:due                            zset      KIND:ID of an item -> ms at which it is due; until done
    NS:jobs:set_at                         zset      the same -> ms at which that was last set; as NS:jobs:due
    NS:jobs:holders                        hash      the same -> token of its holder; until released
    NS:webhooks:models                     set       models whose outbox is read; for ever
    NS:webhooks:outbox                     stream    ends without a model (batches), until a job takes them
    NS:webhooks:event:EVENT                string    WebhookEvent; until purged, or some days after it was delivered
    NS:webhooks:pending, :delivered, :dead zset      events in that state by the ms of their end; as those
    NS:webhooks:secrets                    hash      tenant and URL -> WebhookSecret; for ever
    NS:webhooks:signed                     set       tenants and URLs that have a secret, and INDEXED; for ever
    NS:webhooks:networks                   string    private networks that the last jobs process may call; for ever
    NS:adapters:{NS}:names                 hash      tenant and name -> number, model, AdapterRecord; until removed
    NS:adapters:{NS}:numbers               hash      digest -> number and back, while a name points to it; the last one
    NS:response:TENANT:ID                  string    StoredResponse: input of a response; as its request's log
    NS:idempotency:TENANT:DIGEST           string    Reservation of an Idempotency-Key; a day longer than results
    NS:batches:{NS}:file:ID                string    FileRecord; until it is deleted or expires
    NS:batches:{NS}:files:TENANT           zset      files of a tenant by time; as the file
    NS:batches:{NS}:garbage                zset      file and batch ids by the ms from which their folder may be cleared
    NS:batches:{NS}:batch:ID               hash      a batch: spec, status, counts, holder; BATCH_TTL_MS after its end
    NS:batches:{NS}:batches:TENANT         zset      batches of a tenant by time; as the batch
    NS:batches:{NS}:open                   zset      unfinished batches -> ms at which their runner's lease ends
    NS:{MODEL}:lane:BAND:TENANT            stream    waiting requests of a tenant, by arrival; deleted when empty
    NS:{MODEL}:due:BAND:TENANT             zset      entries of that lane with a deadline, by it; as the lane
    NS:{MODEL}:ready:BAND                  zset      tenants to claim from, by virtual time; deleted when empty
    NS:{MODEL}:heads:BAND                  zset      the same, by arrival of their oldest request
    NS:{MODEL}:idle:BAND                   zset      virtual time of tenants with nothing to claim; until it is passed
    NS:{MODEL}:blocked                     zset      tenants over a quota, by the ms at which to check again
    NS:{MODEL}:active                      set       tenants with requests that wait or run
    NS:{MODEL}:tenant:TENANT               hash      counts of a tenant; deleted when it has no request
    NS:{MODEL}:usage:TENANT                hash      usage of the last minute, if a quota needs it; expires
    NS:{MODEL}:queue                       hash      sums, measured rates, pause; for ever
    NS:{MODEL}:policy                      string    QueuePolicy, where it was configured; for ever
    NS:{MODEL}:tenants                     hash      tenant -> TenantPolicy, where it has its own; for ever
    NS:{MODEL}:deadlines                   zset      requests that have one, by it; removed at their end
    NS:{MODEL}:payload:ID                  string    encoded request from its first claim to its end
    NS:{MODEL}:retry:ID                    string    encoded request that an operator may retry; as its result
    NS:{MODEL}:image:DIGEST                string    bytes of an image, by their SHA-256; while it has users
    NS:{MODEL}:image_users:DIGEST          set       requests that need it, parked ones as {parked}ID; as those
    NS:{MODEL}:rooms                       hash      engine -> its capacity and load; removed with its claims
    NS:{MODEL}:reserved                    string    engine that reserves its cache for a large request; expires
    NS:{MODEL}:returned                    list      ids that were claimed and returned; claimed before the lanes
    NS:{MODEL}:suspects                    list      ids that may have killed an engine; claimed first, run alone
    NS:{MODEL}:ward                        string    engine that drains for the suspects; expires
    NS:{MODEL}:leases                      zset      engine -> ms at which its lease ends; removed with its claims
    NS:{MODEL}:homes                       zset      device that may wake it -> ms at which that ends, unless renewed
    NS:{MODEL}:home_states                 hash      device -> level, ms to wake it, when it is awake; as homes
    NS:{MODEL}:home_errors                 hash      device that has given it up -> code and message; as homes
    NS:{MODEL}:grants                      zset      device that wakes it now -> ms at which that ends
    NS:{MODEL}:claims:ENGINE               hash      request id -> epoch of each claim of the engine
    NS:{MODEL}:clients                     zset      client -> ms at which its lease ends
    NS:{MODEL}:client:CLIENT               set       interactive requests that depend on the client's lease
    NS:{MODEL}:fail_fast                   set       requests that end when no engine is left
    NS:{MODEL}:reaper                      hash      time of the last reap, and from when on leases count
    NS:{MODEL}:dead                        zset      ids of parked requests by time; until replayed or purged
    NS:{MODEL}:parked:ID                   hash      a parked request: payload, cause, counts; as "dead"
    NS:{MODEL}:vacant                      zset      engines to wake for new requests, by how full they are; as rooms
    NS:{MODEL}:warm:DIGEST                 string    engine that last claimed this prefix; warm_ttl_s of the policy
    NS:{MODEL}:adapter:DIGEST              zset      engines that have it loaded -> ms until that expires
    NS:{MODEL}:adapters_of:ENGINE          set       digests of adapters that it has loaded; expires
    NS:{MODEL}:warm_for:ENGINE             zset      requests in lanes that are warm for that engine, by arrival
    NS:{MODEL}:group:GROUP                 hash      generation of a data-parallel group, its ranks; for ever
    NS:{MODEL}:waves:GROUP                 channel   WaveStarted, from a rank of it to the others
    NS:{MODEL}:wake                        channel   "claim again", to all engines: queue resumed, policies changed
    NS:{MODEL}:engine:ENGINE:wake          channel   "claim again", to one engine with free capacity
    NS:{MODEL}:wanted                      channel   "a request waits and no engine claims", to its homes
    NS:{MODEL}:request:ID                  hash      state of a request; result_ttl_ms after its end
    NS:{MODEL}:log:ID                      list      its Delta records; result_ttl_ms after its end
    NS:{MODEL}:events                      stream    moves of requests; the last events_kept of the policy
    NS:{MODEL}:series:STEP:START           hash      counts of those seconds; a day, a week or 90 days
    NS:{MODEL}:ledger:STEP:START           hash      tenant, key and adapter -> their use; 90 days, and 3 years
    NS:{MODEL}:ledger:rows                 list      ends that are no part of the former yet
    NS:{MODEL}:budget_left                 hash      tenant -> tokens until its budgets are read again; until midnight
    NS:{MODEL}:budgets                     hash      budgets of all tenants as its scripts read them; as NS:budgets
    NS:{MODEL}:budget_spent                hash      budget -> start of its period, spent here, elsewhere; as those
    NS:{MODEL}:series_writer:WRITER        string    number of the last addition of a process; an hour
    NS:{MODEL}:outbox                      stream    ends of requests that have a webhook, until a job takes them
    NS:{MODEL}:ends:ID                     hash      answers to a request with a webhook that have ended, until all have
    NS:{MODEL}:input:ID                    list      InputChunks after its first, if it is resumable; as the log
    NS:{MODEL}:output:ID                   channel   the same records, as they are appended
    NS:{MODEL}:engine:ENGINE:commands      channel   cancellations and control calls, to the engine
    NS:{MODEL}:call:CALL:replies           channel   engines' replies to a control call
    NS:{MODEL}:call:CALL:reply:ENGINE      string    the same reply, in case it is missed; REPLY_TTL_MS
    NS:{MODEL}:absent                      none      as NS:absent
    NS:{MODEL}:place                       string    shard of the model, at a Redis without it; for ever
    NS:{MODEL}:moved_by                    string    number of the last move that this Redis took part in; for ever
    NS:{MODEL}:layout                      string    version of the Layout that this partition is in; for ever
    NS:{MODEL}:virtual                     hash      clock of a simulation, and its last entry; never in a deployment
    NS:{MODEL}:expiries                    zset      keys that expire by that clock -> ms; as the clock
"""

from __future__ import annotations

from .values.checks import check_text
from .values.names import DEFAULT_NAMESPACE, as_literal, check_name, partition_name


def channel_in(database: int, channel: str) -> str:
    """Return the name that a channel of ``Keys`` or ``ModelKeys`` has in a database of Redis.

    The number stands behind the model's tag, or behind ``worker``, where the names of database 0 have a colon.
    """
    if database == 0:
        return channel
    mark = "}:" if "}:" in channel else ":worker:"
    before, _, rest = channel.partition(mark)
    return f"{before}{mark[:-1]}/{database}:{rest}"


def lua_channel_prefix_in(database: int) -> str:
    """Return the Lua expression for the first part of such a name, made of ``prefix``, the prefix of a model's keys."""
    return f"string.sub(prefix, 1, -2) .. '/{database}:'"


class Keys:
    """Keys that belong to no model."""

    def __init__(self, namespace: str = DEFAULT_NAMESPACE) -> None:
        self.namespace = check_name("namespace", namespace)

    def models(self) -> str:
        return f"{self.namespace}:models"

    def awaited_models(self) -> str:
        """A hash of the names for which requests were enqueued while no worker had served them."""
        return f"{self.namespace}:awaited_models"

    def forgotten_models(self) -> str:
        return f"{self.namespace}:forgotten_models"

    def budgets(self) -> str:
        return f"{self.namespace}:budgets"

    def budgets_ended(self) -> str:
        return f"{self.namespace}:budgets:ended"

    def budgets_synced(self) -> str:
        return f"{self.namespace}:budgets:synced"

    def engines(self) -> str:
        return f"{self.namespace}:engines"

    def engine(self, engine_id: str) -> str:
        return f"{self.namespace}:engine:{engine_id}"

    def devices(self) -> str:
        return f"{self.namespace}:devices"

    def device(self, device_id: str) -> str:
        return f"{self.namespace}:device:{check_text('device_id', device_id)}"

    def processes(self) -> str:
        return f"{self.namespace}:processes"

    def process(self, process_id: str) -> str:
        return f"{self.namespace}:process:{check_text('process_id', process_id)}"

    def api_keys(self) -> str:
        return f"{self.namespace}:api_keys"

    def operator_keys(self) -> str:
        return f"{self.namespace}:operator_keys"

    def dashboard_secret(self) -> str:
        return f"{self.namespace}:dashboard_secret"

    def audit(self) -> str:
        return f"{self.namespace}:audit"

    def audit_of_apps(self) -> str:
        return f"{self.namespace}:audit:apps"

    def absent(self) -> str:
        """A key that is never written, for commands that shall find nothing."""
        return f"{self.namespace}:absent"

    def placements(self) -> str:
        return f"{self.namespace}:placements"

    def moves(self) -> str:
        return f"{self.namespace}:moves"

    def layouts(self) -> str:
        return f"{self.namespace}:layouts"

    def worker_commands(self, worker_id: str) -> str:
        return f"{self.namespace}:worker:{check_text('worker_id', worker_id)}:commands"

    def jobs(self) -> str:
        return f"{self.namespace}:jobs"

    def jobs_due(self) -> str:
        return f"{self.namespace}:jobs:due"

    def jobs_set_at(self) -> str:
        return f"{self.namespace}:jobs:set_at"

    def job_holders(self) -> str:
        return f"{self.namespace}:jobs:holders"

    def webhook_models(self) -> str:
        return f"{self.namespace}:webhooks:models"

    def webhook_outbox(self) -> str:
        return f"{self.namespace}:webhooks:outbox"

    def webhook_event(self, event_id: str) -> str:
        return f"{self.namespace}:webhooks:event:{check_text('event_id', event_id)}"

    def webhook_events(self, state: str) -> str:
        return f"{self.namespace}:webhooks:{state}"

    def webhook_secrets(self) -> str:
        return f"{self.namespace}:webhooks:secrets"

    def webhooks_signed(self) -> str:
        return f"{self.namespace}:webhooks:signed"

    def webhook_networks(self) -> str:
        return f"{self.namespace}:webhooks:networks"

    def adapters(self) -> str:
        return f"{self.namespace}:adapters:{{{self.namespace}}}:names"

    def adapter_numbers(self) -> str:
        """In one slot with ``adapters``."""
        return f"{self.namespace}:adapters:{{{self.namespace}}}:numbers"

    def responses(self) -> str:
        """Pattern of the responses of all tenants, for ACLs."""
        return f"{as_literal(self.namespace)}:response:*"

    def of_webhooks(self) -> str:
        """Pattern of all keys of webhooks, for ACLs."""
        return f"{as_literal(self.namespace)}:webhooks:*"

    def of_all_models(self) -> str:
        """Pattern of the keys and channels of all models, for ACLs."""
        return f"{as_literal(self.namespace)}:{{*"

    def of_workers(self) -> str:
        """Pattern of the channels of supervisors in all databases, for ACLs."""
        return f"{as_literal(self.namespace)}:worker[:/]*"

    def of_all(self) -> str:
        """Pattern of all keys and channels, for ACLs."""
        return f"{as_literal(self.namespace)}:*"

    def response(self, tenant: str, response_id: str) -> str:
        """``response_id`` holds no colon, so no two tenants share a key."""
        return f"{self.namespace}:response:{check_name('tenant', tenant)}:{response_id}"

    def idempotency(self, tenant: str, digest: str) -> str:
        """``digest`` is that of the caller's key."""
        return f"{self.namespace}:idempotency:{check_name('tenant', tenant)}:{digest}"

    def batches(self) -> BatchKeys:
        return BatchKeys(self.namespace)

    def model(self, model: str, partition: int = 0) -> ModelKeys:
        return ModelKeys(self.namespace, partition_name(model, partition))

    def model_of(self, key: object) -> str | None:
        """Return the model whose tag a key or channel carries; None if it belongs to no model."""
        prefix = f"{self.namespace}:{{"
        if not isinstance(key, str) or not key.startswith(prefix):
            return None
        model, brace, _ = key[len(prefix) :].partition("}")
        return model if brace else None


class BatchKeys:
    """Keys of files and batches, which belong to tenants and not to models."""

    def __init__(self, namespace: str) -> None:
        self._prefix = f"{check_name('namespace', namespace)}:batches:{{{namespace}}}:"
        self.garbage = self._prefix + "garbage"
        self.open = self._prefix + "open"
        self.pattern = as_literal(self._prefix) + "*"

    def file(self, file_id: str) -> str:
        return f"{self._prefix}file:{check_text('file_id', file_id)}"

    def files(self, tenant: str) -> str:
        return f"{self._prefix}files:{check_text('tenant', tenant)}"

    def batch(self, batch_id: str) -> str:
        return f"{self._prefix}batch:{check_text('batch_id', batch_id)}"

    def batches(self, tenant: str) -> str:
        return f"{self._prefix}batches:{check_text('tenant', tenant)}"


class ModelKeys:
    """Keys of one model; ``prefix`` is handed to the scripts, which append ``KIND:ID`` to it."""

    def __init__(self, namespace: str, model: str) -> None:
        self.name = check_name("model", model)
        self.prefix = f"{check_name('namespace', namespace)}:{{{model}}}:"
        self.place = self.prefix + "place"
        self.moved_by = self.prefix + "moved_by"
        self.absent = self.prefix + "absent"
        self.queue = self.prefix + "queue"
        self.policy = self.prefix + "policy"
        self.tenant_policies = self.prefix + "tenants"
        self.active_tenants = self.prefix + "active"
        self.returned = self.prefix + "returned"
        self.suspects = self.prefix + "suspects"
        self.leases = self.prefix + "leases"
        self.clients = self.prefix + "clients"
        self.dead = self.prefix + "dead"
        self.outbox = self.prefix + "outbox"
        self.events = self.prefix + "events"
        self.wake = self.prefix + "wake"
        self.homes = self.prefix + "homes"
        self.wanted = self.prefix + "wanted"
        self.virtual = self.prefix + "virtual"
        self.expiries = self.prefix + "expiries"

    @property
    def patterns_of_requests(self) -> tuple[str, ...]:
        """For SCAN: of what the model knows of requests, with results and what is parked."""
        return tuple(as_literal(self.prefix + kind) + "*" for kind in ("request:", "parked:"))

    @property
    def pattern(self) -> str:
        """Pattern of all keys of the model, for SCAN."""
        return as_literal(self.prefix) + "*"

    def lane(self, band: str, tenant: str) -> str:
        return f"{self.prefix}lane:{band}:{tenant}"

    def heads(self, band: str) -> str:
        return f"{self.prefix}heads:{band}"

    def request(self, request_id: str) -> str:
        return f"{self.prefix}request:{check_text('request_id', request_id)}"

    def log(self, request_id: str) -> str:
        return f"{self.prefix}log:{check_text('request_id', request_id)}"

    def input(self, request_id: str) -> str:
        return f"{self.prefix}input:{check_text('request_id', request_id)}"

    def output(self, request_id: str) -> str:
        return f"{self.prefix}output:{check_text('request_id', request_id)}"

    def claims(self, engine_id: str) -> str:
        return f"{self.prefix}claims:{engine_id}"

    def payload(self, request_id: str) -> str:
        return f"{self.prefix}payload:{check_text('request_id', request_id)}"

    def retry(self, request_id: str) -> str:
        return f"{self.prefix}retry:{check_text('request_id', request_id)}"

    def series(self, step_s: int, start: int) -> str:
        return f"{self.prefix}series:{step_s}:{start}"

    def ledger(self, step_s: int, start: int) -> str:
        return f"{self.prefix}ledger:{step_s}:{start}"

    def image(self, digest: str) -> str:
        return f"{self.prefix}image:{digest}"

    def parked(self, request_id: str) -> str:
        return f"{self.prefix}parked:{check_text('request_id', request_id)}"

    def group(self, group: str) -> str:
        return f"{self.prefix}group:{check_name('data_parallel_group', group)}"

    def group_waves(self, group: str) -> str:
        return f"{self.prefix}waves:{check_name('data_parallel_group', group)}"

    def engine_commands(self, engine_id: str) -> str:
        return f"{self.prefix}engine:{engine_id}:commands"

    def engine_wake(self, engine_id: str) -> str:
        return f"{self.prefix}engine:{engine_id}:wake"

    def call_replies(self, call_id: str) -> str:
        return f"{self.prefix}call:{call_id}:replies"

    def call_reply(self, call_id: str, engine_id: str) -> str:
        return f"{self.prefix}call:{call_id}:reply:{engine_id}"
