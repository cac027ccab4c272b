"""The command line: `main` defines the commands, `cache_commands` does the work of those for caches."""
