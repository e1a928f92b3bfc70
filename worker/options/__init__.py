"""Options, each declared once: at its field of a configuration, with its help and its values.

    field: Annotated[type, Option(help, reader)] = default
        ├─▶ --option of the command line ┐
        ├─▶ PENSTOCK_OPTION              ├─▶ Settings ─▶ the configuration
        ├─▶ option of a --config file    ┘
        └─▶ the table of ops/guide/reference/configuration.md

``readers.py`` has the kinds of values, ``option.py`` the declaration, ``program.py`` the options of one program,
``settings.py`` the precedence of sources and their display. The programs are in
``worker/programs.py``.
"""
