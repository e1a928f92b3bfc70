"""Fields of a body that this server does not have: remove them, and name them to the caller.

Agents and SDKs add fields with every release, and cannot leave them out. So an unknown field is ignored and named in
the response's header ``HEADER``. With ``--strict-fields`` it is refused instead.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

HEADER = "x-penstock-ignored"
OTHER = "other"
# Limit of names in the header.
MAX_NAMES = 20
# Names that programs send, by which ignored fields are counted. All others are counted as ``OTHER``, because a caller
# must not create time series.
COUNTED = frozenset(
    (
        "audio", "cache_control", "client_metadata", "container", "context_management", "diagnostics",
        "enable_thinking", "functions", "inference_geo", "keep_alive", "kv_transfer_params", "length_penalty",
        "mcp_servers", "mm_processor_kwargs", "moderation", "num_ctx", "options", "prompt_cache_options", "provider",
        "reasoning", "return_token_ids", "return_tokens_as_token_ids", "safety_identifier", "speed", "stream_options",
        "thinking", "tool_stream", "transforms", "usage", "verbosity", "web_search_options", "tools.code_interpreter",
        "tools.computer", "tools.file_search", "tools.function", "tools.image_generation", "tools.mcp",
        "tools.web_fetch", "tools.web_search",
    )
)  # fmt: skip
S = TypeVar("S", bound=msgspec.Struct)
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def without_unknown(
    body: Mapping[str, Any], struct: type[msgspec.Struct], refused: Iterable[str] = ()
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return ``body`` without the fields that ``struct`` does not have, and the paths of these fields.

    Structs within ``struct`` are treated the same if they refuse unknown fields. Others ignore them by themselves.

    Args:
        refused: names of fields that stay, so that decoding refuses them, because ignoring them changes the answer.
    """
    ignored: dict[str, None] = {}
    field_names, nested = _fields_of(struct)
    reduced: dict[str, Any] = {}
    for name, value in body.items():
        if name in nested:
            value, paths = _without_unknown_in(value, nested[name])
            ignored |= {f"{name}.{path}": None for path in paths}
        if name in field_names or name in refused:
            reduced[name] = value
        else:
            ignored[name] = None
    return reduced, tuple(ignored)


def decode_known(data: bytes, struct: type[S], *, strict: bool) -> tuple[S, tuple[str, ...]]:
    """Return a JSON body as a struct, and the paths of the fields that were ignored.

    Args:
        strict: refuse unknown fields.

    Raises:
        msgspec.MsgspecError: it is not JSON, or does not have the required form.
    """
    try:
        return msgspec.json.decode(data, type=struct), ()
    except msgspec.ValidationError:
        body = msgspec.json.decode(data)
        if strict or not isinstance(body, Mapping):
            raise
        reduced, ignored = without_unknown(body, struct)
        if not ignored:
            raise
        return msgspec.convert(reduced, struct, str_keys=True), ignored


def header_value(names: Iterable[str]) -> str:
    """Return the value of ``HEADER`` for the paths of ignored fields."""
    paths = sorted({name if _NAME.fullmatch(name) else OTHER for name in names})
    more = [] if len(paths) <= MAX_NAMES else ["..."]
    return ",".join(paths[:MAX_NAMES] + more)


def counted_name(path: str) -> str:
    """Return the name by which an ignored field is counted; there are few."""
    if path in COUNTED:
        return path
    first = path.partition(".")[0]
    return first if first in COUNTED else OTHER


def _without_unknown_in(value: Any, struct: type[msgspec.Struct]) -> tuple[Any, tuple[str, ...]]:
    if isinstance(value, Mapping):
        return without_unknown(value, struct)
    if not isinstance(value, list):
        return value, ()
    items = [_without_unknown_in(item, struct) for item in value]
    return [item for item, _ in items], tuple(path for _, paths in items for path in paths)


@functools.cache
def _fields_of(struct: type[msgspec.Struct]) -> tuple[frozenset[str], dict[str, type[msgspec.Struct]]]:
    """Return the names of the fields of a struct, and the structs of those that hold one, or a list of one."""
    info = inspect.type_info(struct)
    assert isinstance(info, inspect.StructType)
    nested = {field.encode_name: inner for field in info.fields if (inner := _strict_struct(field.type)) is not None}
    return frozenset(field.encode_name for field in info.fields), nested


def _strict_struct(field: inspect.Type) -> type[msgspec.Struct] | None:
    if isinstance(field, inspect.StructType):
        return field.cls if field.forbid_unknown_fields else None
    if isinstance(field, inspect.ListType):
        return _strict_struct(field.item_type)
    if isinstance(field, inspect.UnionType):
        structs = [struct for kind in field.types if (struct := _strict_struct(kind)) is not None]
        return structs[0] if len(structs) == 1 else None
    return None
