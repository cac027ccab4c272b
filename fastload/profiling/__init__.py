"""Where the time of a training loop goes: record any loader, and say what to change.

Read recording (the file that each process writes), spans (the stages of making a batch), probes (which
functions belong to which stage), line_sampler (the lines of user code that take the time), hooks (what a
process records), loader_info (settings and sizes of a loader), recorder (the consumer's side), timeline (the
recordings, read back), prediction (how long steps take after a change), suggestions, report, session.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastload.profiling.report import LoaderReport as LoaderReport
    from fastload.profiling.report import ProfileReport as ProfileReport
    from fastload.profiling.session import Profile as Profile
    from fastload.profiling.session import profile as profile
else:
    from fastload.system.lazy_exports import public_names as _public_names

    __getattr__, __dir__, __all__ = _public_names(
        "fastload.profiling",
        {
            "report": ("LoaderReport", "ProfileReport"),
            "session": ("Profile", "profile"),
        },
    )
