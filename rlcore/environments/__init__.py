"""Where rollouts get their tasks, their answers and their reward; see docs/environments.md."""
