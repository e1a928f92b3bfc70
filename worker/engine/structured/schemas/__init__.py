"""Conversion of JSON schemas to schemas that a library enforces completely.

    document   reads a schema, checks its keywords and values, and resolves references; the same for both libraries
    recursion  refuses schemas that refer to themselves without an end
    xgrammar   ┐ write the schema for a library, from a list of the keywords that it enforces;
    llguidance ┘ everything else is refused
    number_rules: limits the length of numbers, also in the rules that xgrammar generates
    formats, patterns, names, numbers, disjoint: helpers of both writers

No constraint is ignored silently. The lists of keywords were established with random schemas: jsonschema validated the
outputs (``tests/unit/engine/structured``).
"""
