"""What a run records for later stages: trajectories, passes, ranges; and the replay of passes."""
