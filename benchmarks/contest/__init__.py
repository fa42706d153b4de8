"""The frontier's contest: every way to save activations on the same step, each in a process of its own."""
