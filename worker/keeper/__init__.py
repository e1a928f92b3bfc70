"""Several models on one device: the supervisor's keepers decide which of them are awake.

    supervisor ──▶ keeper of a device ──▶ engine of each model ──▶ worker process, or none

``sources.py`` reads which models there are, ``plan.py`` their engines and memory. ``keeper.py`` runs for each device:
it reads demands, lets ``shared/swap/rule.py`` decide, and carries out swaps step by step. ``kept_model.py`` is a model
on a device, ``engine.py`` its processes, and ``report.py`` publishes both. Nothing here imports torch.
"""
