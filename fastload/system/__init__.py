"""Resources of the machine (CPUs, quotas, memory), refusals by the system, readable sizes, and the log."""
