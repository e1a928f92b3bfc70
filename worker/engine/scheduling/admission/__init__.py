"""What requests wait for before they may run, grammars and adapters: the interfaces of whoever brings it. No torch."""
