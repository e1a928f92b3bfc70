"""Options of an engine for diagnosis and control by operators."""

from __future__ import annotations

from typing import Annotated

from ..options.option import Option, OptionGroup
from ..options.readers import Folder, Switch, Texts

CONTROL = "control and diagnosis"


class DiagnosisOptions(OptionGroup):
    """Options for files of diagnosis, and for modules that an engine loads for its callers."""

    profile_dir: Annotated[
        str,
        Option(
            "folder for traces of the torch profiler", Folder(), default="`profiles` in the data folder", group=CONTROL
        ),
    ] = ""
    dump_dir: Annotated[str, Option("folder for a file about each failed step", Folder(), group=CONTROL)] = ""
    dump_prompts: Annotated[
        bool, Option("include the token ids of its requests in that file", Switch(), group=CONTROL)
    ] = False
    rpc_modules: Annotated[
        tuple[str, ...],
        Option(
            "Python module whose @rpc_method functions clients may call in the engine; may be repeated",
            Texts("MODULE"),
            name="rpc_module",
            group=CONTROL,
        ),
    ] = ()
    logits_processors: Annotated[
        tuple[str, ...],
        Option(
            "logits processor that requests may choose by name: MODULE:CLASS, or the name of an installed "
            "plug-in; may be repeated",
            Texts("PROCESSOR"),
            group=CONTROL,
        ),
    ] = ()
