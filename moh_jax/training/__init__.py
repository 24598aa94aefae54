"""Training: tasks, losses, optimizer, train step, and the loop of a run."""
