"""Extension of griffe, which reads the sources for the reference: adapt signatures and docstrings to Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterator

import griffe

_SHARED_LINE = re.compile(r"^(?P<indent> {4})(?P<names>\w+(?:, \w+)+)(?P<text>: .*(?:\n {5,}.*)*)", re.MULTILINE)
_FIELD = re.compile(r"``\w+``[ ,:]|[A-Z][\w ().`-]+: ")
_FIELDS_OF = ("msgspec.Struct", "typing.TypedDict")


class Docstrings(griffe.Extension):
    """Gives structs the signature that msgspec makes of their fields, constants their values, and arguments lines."""

    def on_object(self, *, obj: griffe.Object, loader: griffe.GriffeLoader, **kwargs: object) -> None:
        """Rewrite a docstring so that each argument and field has an entry of its own."""
        del loader, kwargs
        if obj.docstring is not None:
            text = _SHARED_LINE.sub(_split, obj.docstring.value)
            obj.docstring.value = "\n\n".join(_list_fields(part) for part in text.split("\n\n"))

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **kwargs: object) -> None:
        """Complete the signatures of a package, whose classes and constants are all known by then."""
        del loader, kwargs
        for kind in _classes(pkg):
            if "__init__" not in kind.members and any(_has_fields(base) for base in (kind, *kind.mro())):
                _add_init(kind)
            for function in kind.functions.values():
                if not function.is_alias:
                    _show_constants(function)


def _split(line: re.Match[str]) -> str:
    return "\n".join(f"{line['indent']}{name}{line['text']}" for name in line["names"].split(", "))


def _list_fields(paragraph: str) -> str:
    """Return a paragraph whose lines describe fields, ``name`` first, as a list; any other as it is."""
    lines = paragraph.split("\n")
    starts = [i for i, line in enumerate(lines) if i == 0 or lines[i - 1].endswith((".", ":"))]
    heads = [i for i in starts if _FIELD.match(lines[i])]
    if len(heads) < 2:
        return paragraph
    first = heads[0]
    items = [f"- {line}" if i + first in heads else f"    {line}" for i, line in enumerate(lines[first:])]
    return "\n".join([*lines[:first], "", *items]).lstrip("\n")


def _classes(module: griffe.Module) -> Iterator[griffe.Class]:
    yield from (kind for kind in module.classes.values() if not kind.is_alias)
    for part in module.modules.values():
        if not part.is_alias:
            yield from _classes(part)


def _has_fields(kind: griffe.Class) -> bool:
    return any(isinstance(base, griffe.Expr) and base.canonical_path in _FIELDS_OF for base in kind.bases)


def _add_init(kind: griffe.Class) -> None:
    """Add the signature: the fields of the class and, before them, those of its bases."""
    keyword = griffe.ParameterKind.keyword_only
    fields = [
        griffe.Parameter(name, annotation=field.annotation, kind=keyword, default=field.value)
        for name, field in kind.attributes.items()
        if field.annotation is not None and "property" not in field.labels and "ClassVar" not in str(field.annotation)
    ]
    this = griffe.Parameter("self", kind=griffe.ParameterKind.positional_or_keyword)
    kind.set_member("__init__", griffe.Function("__init__", parameters=griffe.Parameters(this, *fields)))


def _show_constants(function: griffe.Function) -> None:
    """Replace defaults that are names of numbers and texts by these."""
    for parameter in function.parameters:
        if not isinstance(parameter.default, griffe.ExprName):
            continue
        try:
            constant = function.modules_collection[parameter.default.canonical_path]
        except KeyError:
            continue
        if constant.is_alias:
            constant = constant.final_target
        if isinstance(constant, griffe.Attribute) and isinstance(constant.value, str):
            parameter.default = constant.value
