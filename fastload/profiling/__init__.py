"""Where the time of a training loop goes: record any loader, and say what to change.

Read stages (what a stack says), sampler (stacks of a process, every few milliseconds), counter (the files
that are decoded), loader_info (settings of a loader), measures (the numbers of one loader), advice, report,
and recorder (what is called).
"""

from fastload.profiling.measures import LoaderReport
from fastload.profiling.recorder import Profile, profile
from fastload.profiling.report import ProfileReport

__all__ = ["LoaderReport", "Profile", "ProfileReport", "profile"]
