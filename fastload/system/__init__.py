"""The machine: its memory, CPUs, files and locks; the ranks of a job, the log, and errors from workers.

Read `budget` (how much memory to take), `cpus` and `limits` first. Then, in any order: `linux`, `locks`,
`disk` and `worker_memory` (what the system offers); `ranks`; `child_process`, `background` and `remote_error`
(processes and threads); `by_value` (what pickle cannot send); `checks` and `paths` (users' arguments);
`os_errors`, `notes`, `logs`, `humanize` and `progress` (what users read); `cache_counts` (hits and misses);
`torch_private` (torch's private names), `torchvision_arrays`, `lazy_exports` (public names) and
`cached_property` (Python's).
"""
