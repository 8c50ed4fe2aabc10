"""Planning: facts of a model and of a machine in, a plan out. Pure, but for ``hardware`` and ``remote``, which measure and fetch."""
