"""What ``moestream doctor`` looks at: one small function a check, and ``survey``, which runs them in order."""
