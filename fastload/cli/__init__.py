"""The command line: `main` has the commands, `cache_commands` does what those of the caches say."""
