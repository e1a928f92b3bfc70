"""``penstock sim``: fleets under virtual time, on the real scripts of the broker.

The guide to it is ``ops/guide/understanding/simulator.md``.

Engines and clients are SimPy processes. All decisions are made inside a Redis as in production: by the scripts of
``shared/broker``, prefixed with ``virtual_time.lua``.
"""
