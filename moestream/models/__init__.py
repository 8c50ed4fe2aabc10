"""Models from a hub. ``names`` is pure; ``hub`` alone uses the network; ``store`` knows what was pulled; ``pull`` joins them."""
