"""``paceline top``: the dashboard in a terminal."""
