"""What the machine has, and what it refuses: CPUs and quotas, memory budgets, sizes for people."""
