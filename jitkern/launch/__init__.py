"""Running a launch function, and loading and starting what was compiled."""
