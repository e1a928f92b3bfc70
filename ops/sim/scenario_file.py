"""Reader of scenario files."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import inspect

from ...shared.errors import ConfigurationError, ValidationError
from ...shared.values.checks import did_you_mean
from .scenario import Scenario


def read_scenario(text: str) -> Scenario:
    """Parse a scenario from TOML.

    Raises:
        ConfigurationError: the text is not TOML, or a key or value is invalid; the message lists valid ones.
    """
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"the scenario is no TOML: {error}") from error
    _check_keys(inspect.type_info(Scenario), tables, "")
    try:
        scenario = msgspec.convert(tables, Scenario)
        if not scenario.tenants:
            raise ValidationError("a scenario needs a table [[tenants]]")
        return scenario
    except (msgspec.ValidationError, ValidationError) as error:
        raise ConfigurationError(f"the scenario: {error}") from error


def _check_keys(kind: inspect.Type, value: Any, where: str) -> None:
    """Raise if a key is no field. This is checked before msgspec, whose errors suggest no similar key."""
    if isinstance(kind, inspect.ListType) and isinstance(value, list):
        for index, item in enumerate(value):
            _check_keys(kind.item_type, item, f"{where}[{index}]")
    elif isinstance(kind, inspect.UnionType):
        for one in kind.types:
            if isinstance(one, inspect.StructType) and _is_meant(one, value):
                _check_keys(one, value, where)
    elif isinstance(kind, inspect.StructType) and isinstance(value, Mapping):
        fields = {field.encode_name: field.type for field in kind.fields}
        for key, item in value.items():
            if key not in fields and key != kind.tag_field:
                hint = did_you_mean(key, fields) or f"there are {', '.join(fields)}"
                raise ConfigurationError(f"the scenario has no key {f'{where}.{key}'.lstrip('.')}; {hint}")
            if key in fields:
                _check_keys(fields[key], item, f"{where}.{key}".lstrip("."))


def _is_meant(kind: inspect.StructType, value: Any) -> bool:
    return isinstance(value, Mapping) and (kind.tag is None or value.get(kind.tag_field) == kind.tag)
