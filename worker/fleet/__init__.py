"""``worker start --ray``: engines of one model on the hosts of a Ray cluster, as many as the queue asks for.

    fleet.py (in the driver) ──place, status, drain──▶ HostAgent (an actor for each bundle) ──stdin──▶ `worker start`
       │ demand.py: queued requests, serving engines                                                      │
       └────────────────────────────── Redis ◀── claims, leases, heartbeats ─────────────────────────────┘

Ray places engines on hosts. The queue assigns requests to engines and recovers them after a death, as without Ray
(ops/decisions/fleets.md). ``scaling.py`` has the scaling rule, ``member.py`` the state of one engine, ``backend.py``
the interface of a cluster. Only ``ray_backend.py`` imports Ray.
"""
