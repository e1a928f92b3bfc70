"""Pages for operators, independent of what shows them: a browser (``ops/dashboard``) or a terminal (``ops/top``).

A page is a value (``page.py``): what it reads from a ``PageSnapshot`` (``source.py``), and its actions. Nothing here
depends on HTTP, HTML or a screen.
"""
