"""Output that follows a grammar: a JSON schema, a regular expression, choices, EBNF or structural tags.

    admission  ──spec──▶ compile threads ──▶ backend (xgrammar or llguidance)
        ▲ request               │ compiled grammar, cached
        └──── Constraint ◀──────┘          table ──bitmask──▶ logits

The libraries are imported when the first request needs one, by a thread that compiles.
"""
