"""Webhooks: who is told of an end, and how; ``ops/guide/webhooks.md`` has the user's side.

    request ends in Redis ──▶ outbox ────▶ event ──────────▶ attempts ─────────────▶ delivered | dead
             finish.lua …     outbox.py    event_store.py    delivery.py, sender.py

The end and its entry in the outbox are one script, so an end is told if it was. Everything after that is a job
(``penstock.producer.jobs``), which may die and be done again: an event has its id from the script on.
"""
