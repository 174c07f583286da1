"""What samples rollouts: a running Paceline server, reached by its URL."""
