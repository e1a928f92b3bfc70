"""Options, each said once: where a field of a configuration is declared, with its help and what it may be.

    field: Annotated[type, Option(help, reader)] = default
        ├─▶ --option of the command line ┐
        ├─▶ PENSTOCK_OPTION              ├─▶ Settings ─▶ the configuration
        ├─▶ option of a --config file    ┘
        └─▶ the table of ops/guide/configuration.md

``readers.py`` has the kinds of values, ``option.py`` what is declared, ``program.py`` the options that one program has,
``settings.py`` who wins, ``told.py`` how options are shown. Which programs there are: ``worker/programs.py``.
"""
