"""JSON schemas as the libraries hold to them.

    document   reads a schema: keywords by name and value, references; the same for both
    recursion  refuses what refers to itself without an end
    xgrammar   ┐ write what is left for a library, by a list of what it holds to;
    llguidance ┘ all else is refused
    number_rules: the limits of the length of numbers, and xgrammar's rules with them
    formats, patterns, names, numbers, disjoint: what both ask about parts of a schema

No constraint is passed over in silence. The lists were found by schemas drawn at random, whose outputs jsonschema
judged (``tests/unit/engine/structured``).
"""
