"""The command line: parses arguments, calls one function of a lower layer, and prints its result.

Read `main` (the commands), `terminal` (how each answers), `arguments` and `source_argument` (what they
parse), then `cache_commands`, `bench_command`, `script` (run and profile) and `source_report` (doctor).
"""
