"""Where the time of a training loop goes: record any loader, and say what to change.

Read stages (what a stack says), sampler (stacks of a process, every few milliseconds), counter (the files
that are decoded), loader_info (settings of a loader), measures (the numbers of one loader), advice, report,
and recorder (what is called).
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastload.profiling.measures import LoaderReport as LoaderReport
    from fastload.profiling.recorder import Profile as Profile
    from fastload.profiling.recorder import profile as profile
    from fastload.profiling.report import ProfileReport as ProfileReport
else:
    from fastload.system.lazy_exports import public_names as _public_names

    __getattr__, __dir__, __all__ = _public_names(
        "fastload.profiling",
        {
            "measures": ("LoaderReport",),
            "recorder": ("Profile", "profile"),
            "report": ("ProfileReport",),
        },
    )
