"""Mutation testing of the parts that keep Penstock's promise: scripts, publisher and reader.

Each mutation is one deliberate defect. A defect that no test notices marks a promise that nothing checks.
"""
