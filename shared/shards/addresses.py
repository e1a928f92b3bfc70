"""The shards of a deployment: their names and URLs, from one text that people write.

    PENSTOCK_SHARDS=a=redis://10.0.0.1:6379,b=redis+sentinel://s1,s2,s3/penstock

A name is what placements are recorded by, so that a server may move to another address. Where none is given it is the
host and port.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ..errors import ConfigurationError
from ..process.secret_files import variable_or_file
from ..redis_access.url import CLUSTER_SCHEMES, SCHEMES, parse_pool
from ..values.shown import mask_url, shown
from .cluster_topology import Topology, is_cluster_url

SHARDS_VARIABLE = "PENSTOCK_SHARDS"
# The Redis at the usual URL: models that were there before there were shards stay.
HOME = "home"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:/-]{0,63}")
# Addresses of Sentinels and nodes are separated by commas, too: a shard begins at a comma with a scheme behind it.
_NEXT = re.compile(r",(?=\s*(?:[A-Za-z0-9_.:/-]+=)?(?:" + "|".join(map(re.escape, (*SCHEMES, *CLUSTER_SCHEMES))) + "))")

ShardsArgument = str | Sequence[str] | Mapping[str, str] | None


def parse_shards(argument: ShardsArgument) -> dict[str, str]:
    """Return name -> URL of each shard; empty where there are none.

    Args:
        argument: ``name=url,url,…``, a list of these, or a mapping; PENSTOCK_SHARDS or its file when None.

    Raises:
        ConfigurationError: a URL cannot be read, or a name is taken twice or is no name.
    """
    if argument is None:
        argument = variable_or_file(SHARDS_VARIABLE)
    if isinstance(argument, Mapping):
        parts = [f"{name}={url}" for name, url in argument.items()]
    else:
        parts = _NEXT.split(argument) if isinstance(argument, str) else [*argument]
    shards: dict[str, str] = {}
    for part in filter(None, map(str.strip, parts)):
        name, url = _read_part(part)
        if is_cluster_url(url):
            Topology(url)
        else:
            parse_pool(url)
        if name == HOME or not _NAME.fullmatch(name):
            raise ConfigurationError(
                f"shards: {shown(name)} cannot be a shard's name: up to 64 letters, digits and _.:/-, and not {HOME!r}"
            )
        if name in shards:
            raise ConfigurationError(f"shards: the name {shown(name)} is given twice; write NAME=URL with another one")
        shards[name] = url
    return shards


def mask_shards(text: str) -> str:
    """Return a text as ``parse_shards`` reads it with the URLs masked."""
    parts = [
        re.fullmatch(r"(\s*(?:[A-Za-z0-9_.:/-]+=(?=\w+(?:\+\w+)?://))?)(.*)", part, re.S) for part in _NEXT.split(text)
    ]
    return ",".join(part[1] + mask_url(part[2]) for part in parts if part)


def shards_text(given: ShardsArgument) -> str:
    """Return shards as ``parse_shards`` reads them from a text, with their names and passwords."""
    return ",".join(f"{name}={url}" for name, url in parse_shards(given).items())


def _read_part(part: str) -> tuple[str, str]:
    name, equals, url = part.partition("=")
    if equals and "://" not in name and "://" in url:
        return name, url
    address = re.sub(r"^[^:]*://", "", mask_url(part)).partition("?")[0].rpartition("@")[2].strip("/")
    return re.sub(r"[^A-Za-z0-9_.:/-]+", "-", address)[:64] or "shard", part
