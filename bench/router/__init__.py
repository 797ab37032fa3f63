"""What the router decides and what it costs: `python -m bench.router replay | decide | overhead`."""
