"""Traffic that a target makes by itself: prompts it writes, and its answers to them."""
