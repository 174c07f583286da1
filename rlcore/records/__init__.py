"""The records that cross a process border, and the checks a receiver makes before it allocates.

Wire form of a message is a list of frames. Frame 0 is a msgpack header (a tagged struct of ``trace``,
``engine_link`` or ``learner_link``); the frames after it are raw tensor bytes, in the order of
``header.tensors``, sent without a copy. Nothing here is pickled and nothing here imports torch: shapes and
sizes are compared with arithmetic first, and only then does a receiver view the bytes.
"""
