"""The machine's resources and refusals, readable sizes, the log, and errors on their way from workers."""
