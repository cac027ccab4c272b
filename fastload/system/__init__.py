"""Resources of the machine: CPUs and quotas, memory budgets, refusals by the system, readable sizes."""
