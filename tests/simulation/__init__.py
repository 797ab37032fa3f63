"""A cluster in one process: the production router, nodes and engines on a virtual clock, all faults from one seed."""
