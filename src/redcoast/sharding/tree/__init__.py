"""The leaves of a PyTree as the planner sees them: paths, shapes, overrides, optimizer state."""
