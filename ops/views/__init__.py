"""What operators look at and change, whatever shows it: a browser (``ops/dashboard``) or a terminal (``ops/top``).

A page is a value (``page.py``): what it reads of a ``Moment`` (``source.py``), and its actions. Nothing here knows
HTTP, HTML or a screen.
"""
