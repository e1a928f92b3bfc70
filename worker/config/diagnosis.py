"""Options of an engine for diagnosis and control by operators."""

from __future__ import annotations

from typing import Annotated

from ..options.groups import OptionGroup
from ..options.option import Option
from ..options.readers import Folder, Switch, Texts

CONTROL = "control and diagnosis"


class DiagnosisOptions(OptionGroup):
    """Options for files of diagnosis, and for modules that an engine loads for its callers."""

    profile_dir: Annotated[
        str,
        Option("for traces of the torch profiler", Folder(), default="`profiles` in the data folder", group=CONTROL),
    ] = ""
    dump_dir: Annotated[str, Option("for a file about each step that failed", Folder(), group=CONTROL)] = ""
    dump_prompts: Annotated[
        bool, Option("tell the token ids of its requests in there, too", Switch(), group=CONTROL)
    ] = False
    rpc_modules: Annotated[
        tuple[str, ...],
        Option(
            "Python module whose @rpc_method functions clients may call in the engine; may be given several times",
            Texts("MODULE"),
            name="rpc_module",
            group=CONTROL,
        ),
    ] = ()
    logits_processors: Annotated[
        tuple[str, ...],
        Option(
            "logits processor that requests may choose by name: MODULE:CLASS, or the name of an installed plug-in; may "
            "be given several times",
            Texts("PROCESSOR"),
            group=CONTROL,
        ),
    ] = ()
