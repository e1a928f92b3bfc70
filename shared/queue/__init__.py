"""The queue in words: states and moves of requests, their events, policies, figures."""
