"""A discrete-event simulator of a cluster, around the schedulers, router, admission and block pools that serve."""
