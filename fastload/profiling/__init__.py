"""Where the time of a training loop goes: watch any loader, measure, and say what to change.

Read recording (the file that each process writes), spans (which stage a thread is in), probes (which
functions belong to which stage), hot_lines (the lines of user code that take the time), hooks (what a process
records), facts (settings and sizes of a loader), watching (the consumer's side), timeline (the recordings,
read back), prediction (how long steps take after a change), suggestions, report, trace, session.
"""
