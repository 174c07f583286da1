"""What samples rollouts: a server of the run, a running one reached by its URL, or an engine of the process."""
