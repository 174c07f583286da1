"""Advantages, policy losses and their corrections, as pure torch functions, and the named recipes.

Batches are packed: one entry for each sampled token of the batch, with the index of its rollout in
``sequence``. Nothing here knows of models, environments or processes.
"""
