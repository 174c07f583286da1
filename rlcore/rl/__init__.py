"""Policy RL: the run that ties generator, environments and trainer together, and its commands."""
