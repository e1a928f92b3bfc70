"""Work besides requests: the schedule of due items, threads, and slots shared among tenants."""
