"""moestream: run mixture-of-experts models that do not fit in memory."""

__version__ = "0.1.0"
