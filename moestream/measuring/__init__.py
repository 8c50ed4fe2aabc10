"""What ``moestream bench`` is made of: streamed answers and their times, the machine they were measured on, statistics, a plot."""
