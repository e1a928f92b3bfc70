"""``penstock sim``: fleets under virtual time, on the real scripts of the broker. See ``ops/guide/simulator.md``.

Engines and clients are SimPy processes. What decides anything runs where it always does, inside a Redis: the scripts of
``shared/broker``, with ``virtual_time.lua`` before them.
"""
