"""Formats as regular expressions, which both libraries enforce.

The libraries' own formats are looser than the standard, or match text that JSON does not allow. Each pattern here
matches only text that the standard allows. Dates, times, IP addresses and pointers are complete. Names and links are
limited to their usual forms, because the full grammars are too long for their use: a URI has no user, and an e-mail
address has no quoted local part.
"""

from __future__ import annotations

_MONTH_DAY = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_FOURTH = "(?:0[48]|[2468][048]|[13579][26])"
_LEAP_YEAR = f"(?:[0-9]{{2}}{_FOURTH}|{_FOURTH}00)"
_DATE = f"(?:{_YEAR}-{_MONTH_DAY}|{_LEAP_YEAR}-02-29)"
_OF_DAY = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_OF_DAY}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{_OF_DAY})"
_N = "[0-9]{1,9}"
_DAYS = f"(?:{_N}Y(?:{_N}M(?:{_N}D)?)?|{_N}M(?:{_N}D)?|{_N}D)"
_HOURS = f"T(?:{_N}H(?:{_N}M(?:{_N}S)?)?|{_N}M(?:{_N}S)?|{_N}S)"
# Without "--", which is reserved for names in other alphabets, and at most 63 characters per label and 253 in total.
_LABEL = "[A-Za-z0-9]{1,20}(?:-[A-Za-z0-9]{1,20}){0,2}"
_LAST_LABEL = "[A-Za-z][A-Za-z0-9]{0,19}(?:-[A-Za-z0-9]{1,20}){0,2}"
_HOST = rf"(?:{_LABEL}\.){{0,2}}{_LAST_LABEL}"
_LOCAL = r"[A-Za-z0-9_+-]{1,20}(?:\.[A-Za-z0-9_+-]{1,20}){0,2}"
_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_H = "[0-9A-Fa-f]{1,4}"
_IPV6 = "|".join(
    (
        f"(?:{_H}:){{7}}{_H}",
        f"(?:{_H}:){{1,7}}:",
        *(f"(?:{_H}:){{1,{7 - n}}}(?::{_H}){{1,{n}}}" for n in range(1, 7)),
        f":(?:(?::{_H}){{1,7}}|:)",
    )
)
_PERCENT = "%[0-9A-Fa-f]{2}"
_CHAR = rf"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|{_PERCENT})"
_PATH = f"(?:/{_CHAR}*)*"
_TAIL = rf"(?:\?(?:[/?]|{_CHAR})*)?(?:#(?:[/?]|{_CHAR})*)?"
_AUTHORITY = rf"//{_HOST}(?::[1-9][0-9]{{0,3}})?"
_URI = rf"[A-Za-z][A-Za-z0-9+.-]*:(?:{_AUTHORITY}{_PATH}|/?{_CHAR}+{_PATH}){_TAIL}"
_FIRST_CHAR = rf"(?:[A-Za-z0-9._~!$&'()*+,;=@-]|{_PERCENT})"
_URI_REFERENCE = f"(?:{_URI}|(?:/?{_FIRST_CHAR}+{_PATH})?{_TAIL})"
_VARIABLE = "[A-Za-z0-9_]+(?::[1-9][0-9]{0,3})?"
_POINTER = "(?:/(?:[^/~]|~[01])*)*"

PATTERNS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P(?:{_N}W|{_DAYS}(?:{_HOURS})?|{_HOURS})",
    "email": f"{_LOCAL}@{_HOST}",
    "hostname": _HOST,
    "ipv4": rf"{_OCTET}(?:\.{_OCTET}){{3}}",
    "ipv6": f"(?:{_IPV6})",
    "uri": _URI,
    "uri-reference": _URI_REFERENCE,
    "uri-template": rf"(?:[A-Za-z0-9._~!$&()*+,;=:@/?#-]|{_PERCENT}|\{{[+#./;?&]?{_VARIABLE}(?:,{_VARIABLE})*\}})*",
    "uuid": "[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
    "json-pointer": _POINTER,
    "relative-json-pointer": f"(?:0|[1-9][0-9]{{0,8}})(?:#|{_POINTER})",
}
# These formats also allow characters beyond ASCII, but the output uses none.
PATTERNS |= {f"idn-{name}": PATTERNS[name] for name in ("email", "hostname")}
PATTERNS |= {"iri": PATTERNS["uri"], "iri-reference": PATTERNS["uri-reference"]}
