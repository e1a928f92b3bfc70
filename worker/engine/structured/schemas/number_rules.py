"""Limits the length of numbers in JSON output, and adds these limits to the rules that xgrammar generates.

JSON has no limit, but a parser that uses doubles reads ``1e400`` as infinity. xgrammar has no option for a limit, so
the rules of numbers are rewritten in the EBNF that it prints for a schema. ``schemas/xgrammar.py`` writes every number
of a schema as a definition whose name begins with ``NUMBER_NAME``. The rewrite starts from the rules of these
definitions and from the number rules of any JSON value. All rules reachable from them spell numbers only, so patterns
of strings remain unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

# With both limits a number is below 1e299.
MAX_INTEGER_DIGITS = 200
MAX_EXPONENT_DIGITS = 2
# More digits than any constant of a schema has: 1e-308 without an exponent has 308.
MAX_FRACTION_DIGITS = 400
NUMBER_NAME = "number"

_RULE = re.compile(r"^(\w+) ::= (.*)$", re.MULTILINE)
# Without a number at the end, because xgrammar drops digits in names of definitions.
_ROOT = re.compile(rf"defs_{NUMBER_NAME}|basic_number|basic_integer")
_NAME = re.compile(r"[A-Za-z_]\w*")
_ENDLESS = re.compile(r"\{(\d+), -1\}")
_MULTIPLE = re.compile(r"(\w+_multiple_of_(\d+)_mod_)(\d+)((?:_\d+)?)")
# Multiples need one rule per remainder and number of remaining digits. They are limited to fewer digits, because a
# grammar of 10,000 rules takes 1 s to compile.
_MAX_MULTIPLE_DIGITS = 40
_MIN_MULTIPLE_DIGITS = 12
_MAX_MULTIPLE_RULES = 2048


def limit_numbers(ebnf: str) -> str:
    """Return the grammar ``ebnf``, printed by xgrammar for JSON schemas, with numbers of limited length."""
    bodies: dict[str, str] = dict(_RULE.findall(ebnf))
    names = _reachable({name for name in bodies if _ROOT.match(name)}, bodies)
    multiples: dict[tuple[str, str], _Multiples] = {}

    def rewrite(rule: re.Match[str]) -> str:
        name, body = rule.groups()
        if name not in names:
            return rule[0]
        if _MULTIPLE.fullmatch(name):  # replaced by the rules below
            return ""
        return f"{name} ::= {_MULTIPLE.sub(refer, _limit_repetition(body))}"

    def refer(reference: re.Match[str]) -> str:
        prefix, divisor, remainder, suffix = reference.groups()
        if (prefix, suffix) not in multiples:
            multiples[prefix, suffix] = _Multiples(f"{prefix}left{suffix}_", int(divisor))
        return multiples[prefix, suffix].names[int(remainder)]

    rewritten = _RULE.sub(rewrite, ebnf)
    return "\n".join([rewritten, *(rule for family in multiples.values() for rule in family.rules)])


def _reachable(roots: set[str], bodies: dict[str, str]) -> set[str]:
    names: set[str] = set()
    pending = list(roots)
    while pending:
        name = pending.pop()
        if name in bodies and name not in names:
            names.add(name)
            pending += _NAME.findall(bodies[name])
    return names


def _limit_repetition(body: str) -> str:
    """Return the body of a number rule with all repetition limited."""
    limit = MAX_INTEGER_DIGITS - 1
    if "[eE]" in body:
        limit = MAX_EXPONENT_DIGITS
    elif '"."' in body:
        limit = MAX_FRACTION_DIGITS
    body = _ENDLESS.sub(lambda count: f"{{{count[1]}, {max(limit, int(count[1]))}}}", body)
    return body.replace("[0-9]*", f"[0-9]{{0, {limit}}}")


class _Multiples:
    """Rules for the digits that complete a multiple of ``divisor`` after the first digits.

    Attributes:
        names: name of the rule for the remaining digits, by the remainder of the digits before. Rules with the same
            body share a name. A remainder that no digits complete has no rule.
    """

    def __init__(self, prefix: str, divisor: int) -> None:
        self._prefix = prefix
        self._names: dict[str, str] = {}
        self.names = {0: self._name_of('""')}
        for num_digits in range(1, _MAX_MULTIPLE_DIGITS):
            if num_digits >= _MIN_MULTIPLE_DIGITS and len(self._names) > _MAX_MULTIPLE_RULES:
                break
            self.names = dict(self._with_a_digit_more(divisor))

    @property
    def rules(self) -> list[str]:
        return [f"{name} ::= {body}" for body, name in self._names.items()]

    def _name_of(self, body: str) -> str:
        return self._names.setdefault(body, f"{self._prefix}{len(self._names)}")

    def _with_a_digit_more(self, divisor: int) -> Iterator[tuple[int, str]]:
        for remainder in range(divisor):
            following = [(digit, self.names.get((remainder * 10 + digit) % divisor)) for digit in range(10)]
            alternatives = [f'"{digit}" {name}' for digit, name in following if name is not None]
            if remainder == 0:
                alternatives.insert(0, '""')
            if alternatives:
                yield remainder, self._name_of(" | ".join(alternatives))
