"""What runs when in policy RL: admission, task order, priorities, controllers and accounts.

Pure: no engine, no clock, no I/O. The run loop feeds these and obeys them; what a resumed run needs
is in their ``state()``, which is JSON-able.
"""
