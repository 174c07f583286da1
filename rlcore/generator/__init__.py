"""What samples rollouts: a server that is started, one that runs already, or an engine of the process."""
