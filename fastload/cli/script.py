"""Runs a Python script or module in this process, as `python SCRIPT ARGS` or `python -m MODULE ARGS` would.

The script becomes `__main__` until the process ends, as under plain python, because functions that run at
exit, threads and pickles need it. One process therefore runs one script.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import os
import pkgutil
import runpy
import sys
import types
from importlib.machinery import BuiltinImporter, SourceFileLoader
from typing import TYPE_CHECKING, Any

from fastload.cli.arguments import write_output
from fastload.cli.terminal import CommandError
from fastload.system.logs import write_stderr

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from fastload.profiling.report import ProfileReport

USAGE = 2  # the exit code of python, and of argparse, for wrong arguments


def run_script(target: str, args: list[str], *, as_module: bool = False, options: Iterable[str] = ()) -> None:
    """Run a script to its end.

    `sys.argv`, `sys.path[0]` and `__main__` are those of plain python, so argparse, pickling, and child
    processes of all start methods work in the same way. The caller should do nothing after this call that an
    error of the script must not skip, or do it in a `finally`.

    Args:
        target: The path of a file, or of a directory or zip archive with a
            `__main__.py`; "-" for a script on standard input; with `as_module`, the name of a module.
        args: The arguments of the script, `sys.argv[1:]`.
        as_module: Run `target` as `python -m` does.
        options: Of the command, for those who pass them to the script.

    Raises:
        SystemExit: From the script; or with code 2, as python, if there is no such file.
        BaseException: From the script. If nobody handles it, the interpreter prints it without the frames of
            the caller, and ends with the exit code, or by the signal, of plain python.
    """
    main = types.ModuleType("__main__")
    vars(main)["__builtins__"] = builtins
    if sys.version_info < (3, 14):  # later, the code itself makes its annotations, which an entry would hide
        vars(main)["__annotations__"] = {}
    sys.modules["__main__"] = main
    if "__mp_main__" in sys.modules:  # multiprocessing was imported before; pickles from children name it
        sys.modules["__mp_main__"] = main
    sys.argv[:] = [target, *args]
    try:
        with own_options_named(args, options):
            _run(target, main, as_module=as_module)
    except SystemExit:
        raise
    except BaseException as error:
        _hide_own_frames(error)
        raise


def _run(target: str, main: types.ModuleType, *, as_module: bool) -> None:
    if as_module:
        _set_first_path(os.getcwd())
        _run_as_main(target, alter_argv=True)
    elif target == "-":
        _run_stdin(vars(main))
    elif _is_importable(target):
        _set_first_path(os.path.join(os.getcwd(), target), even_if_safe=True)
        _run_as_main("__main__", alter_argv=False)
    else:
        _run_file(target, vars(main))


def _run_file(target: str, namespace: dict[str, Any]) -> None:
    """Run one file, as the interpreter does for `python FILE`."""
    path = os.path.join(os.getcwd(), target)
    try:
        with io.open_code(path) as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
    except OSError as error:
        sys.stderr.write(
            f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}\n"
        )
        raise SystemExit(2) from None
    namespace.update(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))
    _set_first_path(os.path.dirname(os.path.realpath(path)))
    exec(code, namespace)


def _run_stdin(namespace: dict[str, Any]) -> None:
    """Run the script on standard input, as the interpreter does for `python -`."""
    code = compile(sys.stdin.buffer.read(), "<stdin>", "exec", dont_inherit=True)
    namespace.update(__file__="<stdin>", __cached__=None, __loader__=BuiltinImporter)
    _set_first_path("")
    exec(code, namespace)


def _is_importable(target: str) -> bool:
    """Whether a path is a directory or an archive, which python searches for a `__main__`."""
    return pkgutil.get_importer(target) is not None


def _set_first_path(path: str, *, even_if_safe: bool = False) -> None:
    """Replace the command's folder with the script's own; `python -P` adds no such folder."""
    if not sys.flags.safe_path:
        sys.path[0] = path
    elif even_if_safe:
        sys.path.insert(0, path)


def _run_as_main(name: str, *, alter_argv: bool) -> None:
    # The function that the interpreter itself calls for `python -m`. The public run_module() would restore
    # `__main__` at the end, before functions that run at exit.
    run_as_main: Any = runpy._run_module_as_main  # type: ignore[attr-defined]
    run_as_main(name, alter_argv=alter_argv)


def _hide_own_frames(error: BaseException) -> None:
    """Let the interpreter show the frames of an unhandled error from the script's first frame on."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_frame.f_code.co_filename == __file__:
        traceback = traceback.tb_next  # the frames of runpy stay: plain python shows them, too
    show = sys.excepthook  # the script might have set it

    def excepthook(
        kind: type[BaseException], value: BaseException, shown: types.TracebackType | None
    ) -> None:
        if value is error:
            shown = traceback
            value = value.with_traceback(traceback)
        show(kind, value, shown)

    sys.excepthook = excepthook


@contextlib.contextmanager
def own_options_named(args: list[str], options: Iterable[str]) -> Iterator[None]:
    """If the script refuses its arguments, say which of them are options of fastload.

    Args:
        args: Those of the script.
        options: Those of the command.
    """
    try:
        yield
    except SystemExit as error:
        given = [name for name in (arg.partition("=")[0] for arg in args) if name in options]
        if error.code == USAGE and given:
            write_stderr(f"fastload: {given[0]} went to the script: options of fastload come before SCRIPT\n")
        raise


# --- under a profile -------------------------------------------------------------------------------------


def profile_script(
    target: str,
    args: list[str],
    *,
    as_module: bool,
    output: str | None,
    options: Iterable[str] = (),
) -> None:
    """Run a script to its end under a profile, and print the report, also after an error or Ctrl-C.

    The report goes to standard error and leaves the script's output alone. The script's exit code, or the
    signal or traceback that ends it, is the command's.

    Args:
        target: As for `run_script`.
        args: As for `run_script`.
        as_module: As for `run_script`.
        output: Where to write the report as JSON; None: nowhere.
        options: As for `run_script`.

    Raises:
        BaseException: Whatever ends the script.
    """
    from fastload.profiling.hooks import FOLDER
    from fastload.profiling.session import Profile
    from fastload.system.remote_error import hide_frames

    pid = os.getpid()
    profile = Profile(()).start()
    has_begun = True
    try:
        run_script(target, args, as_module=as_module, options=options)
    except BaseException as error:
        hide_frames(error, (FOLDER,))
        has_begun = not isinstance(error, SystemExit) or error.code != USAGE
        raise
    finally:
        if os.getpid() == pid:  # a process that the script forked ends here, too
            try:
                profile.stop()
            finally:
                if has_begun or profile.report().loaders:
                    _save(profile.report(), output)


def _save(report: ProfileReport, output: str | None) -> None:
    """Print the report, and write its file; an error does not hide how the script ended."""
    with contextlib.suppress(AttributeError, OSError, ValueError):  # None, unread, or closed by the script
        sys.stdout.flush()
    write_stderr(f"\n{report}\n")
    if output is None:
        return
    try:
        write_output(output, report.as_dict())
    except CommandError as error:
        write_stderr(f"fastload: error: {error}\n")
    else:
        write_stderr(f"fastload: wrote {output}\n")
