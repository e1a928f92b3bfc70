"""``worker start --ray``: engines of one model on the hosts of a Ray cluster, as many as the queue asks for.

    fleet.py (in the driver) ──place, status, drain──▶ HostAgent (an actor for each bundle) ──stdin──▶ `worker start`
       │ demand.py: what waits, who serves                                                                │
       └────────────────────────────── Redis ◀── claims, leases, heartbeats ─────────────────────────────┘

Ray decides where an engine is and finds hosts for it. Which request an engine has, and that none is lost when it dies,
is the queue's affair as ever (decision 0089). ``scaling.py`` is the rule, ``member.py`` one engine's life,
``ground.py`` what a fleet needs of a cluster; ``ray_ground.py`` alone knows Ray.
"""
