"""Time and memory of losses, ours beside others, as ``vl-plugins bench`` compares them."""
