"""How many tokens to draft: what a step costs, what drafts return, and the choice between them.

Pure: no engine, no clock, no I/O. ``rlcore.engine.scheduler`` feeds it and obeys it.
"""
