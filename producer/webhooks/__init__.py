"""Webhooks: events about the ends of requests, and their delivery; the user's guide is ``ops/guide/howto/webhooks.md``.

    request ends in Redis ──▶ outbox ────▶ event ──────────▶ attempts ─────────────▶ delivered | dead
             finish.lua …     outbox.py    event_store.py    delivery.py

One script writes the end of a request and its outbox entry, so every end gets its event. Each later step is a job
(``penstock.producer.jobs``) that may die and be repeated: an event has its id from the script on.
"""
