"""The documentation as a site: pages, links between them, and the reference that is generated from the code.

MkDocs loads ``hooks.py``, as ``mkdocs.yml`` says; ``make docs`` builds the site.
"""
