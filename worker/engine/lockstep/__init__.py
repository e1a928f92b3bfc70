"""Our core as a rank of a data-parallel group: it steps when ``waves`` says so, and in each step makes one forward."""
