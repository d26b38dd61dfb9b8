"""Work that may kill its process, done in a child that is kept warm between calls.

A build may abort, crash, hang or allocate without bound. The child owns the build; the parent only sends it the name of
a function and its arguments, and gets back a value, the exception it raised, or the fact of its death. After a death the
next call starts a new child.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any, ClassVar, Literal

_PR_SET_PDEATHSIG = 1
_STDERR_BYTES = 4000


class ChildDeath(Exception):
    """The child ended, or was ended, before it answered.

    Attributes:
        verdict: what a death of this sort is called in results.
        how: in words, for example "aborted (SIGABRT)".
        stderr: the last lines it wrote during the call.

    """

    verdict: ClassVar[Literal["CRASH", "TIMEOUT"]]

    def __init__(self, how: str, stderr: str) -> None:
        super().__init__(how)
        self.how, self.stderr = how, stderr

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.how, self.stderr)  # a child's own child may have died

    def __str__(self) -> str:
        last = self.stderr.strip().splitlines()[-3:]
        return f"{self.how}{': ' + ' | '.join(last) if last else ''}"


class Crashed(ChildDeath):
    """A signal, an abort, or an exit nobody asked for."""

    verdict = "CRASH"


class TimedOut(ChildDeath):
    """No answer within the time allowed; the child was killed."""

    verdict = "TIMEOUT"


class ChildError(Exception):
    """The called function raised something that cannot travel; the text is its traceback."""


class Child:
    """A process that runs functions by name, one at a time.

    Args:
        memory_limit: most bytes of address space, None for no limit. Some builds allocate tens of GB on a corrupt count.
        environment: variables to set beside the parent's.

    """

    def __init__(self, *, memory_limit: int | None = None, environment: Mapping[str, str] | None = None) -> None:
        self.memory_limit = memory_limit
        self.environment = dict(environment or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._stderr: Any = None
        self._stderr_mark = 0

    def call(self, function: Callable[..., Any] | str, *arguments: Any, timeout: float | None = None) -> Any:
        """Run a module-level function in the child and return what it returns.

        Args:
            function: the function, or "module:name".
            arguments: anything that pickles.
            timeout: seconds to wait, None to wait for ever.

        Raises:
            Crashed, TimedOut: the child died.
            Exception: whatever the function raised.

        """
        name = function if isinstance(function, str) else f"{function.__module__}:{function.__qualname__}"
        connection = self._started()
        self._stderr_mark = os.fstat(self._stderr.fileno()).st_size
        try:
            connection.send((name, arguments))
            if not connection.poll(timeout):
                raise self._died(TimedOut, f"gave no answer within {timeout:.3g} s and was killed")
            kind, value = connection.recv()
        except (EOFError, ConnectionError):
            raise self._died(Crashed) from None
        if kind == "raised":
            raise value
        return value

    def close(self) -> None:
        """End the child; the next call starts a new one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._process is not None:
            try:
                self._process.wait(timeout=2)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
        if self._stderr is not None:
            self._stderr.close()
            self._stderr = None

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _started(self) -> Connection:
        if self._connection is not None:
            return self._connection
        ours, theirs = socket.socketpair()
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the child
        command = [sys.executable, "-m", __name__, str(theirs.fileno()), str(os.getpid()), str(self.memory_limit or 0)]
        self._process = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self._stderr,
            stderr=self._stderr,
            env={**os.environ, "GGML_NO_BACKTRACE": "1", **self.environment},
        )
        theirs.close()
        self._connection = Connection(ours.detach())
        return self._connection

    def _died(self, error: type[ChildDeath], how: str | None = None) -> ChildDeath:
        assert self._process is not None
        if how is not None:
            self._process.kill()
        try:
            code = self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        self._stderr.seek(self._stderr_mark)
        stderr = self._stderr.read()[-_STDERR_BYTES:].decode(errors="replace")
        self.close()
        return error(how or _in_words(code), stderr)


def _in_words(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    name = signal.Signals(-code).name
    return f"{'aborted' if name == 'SIGABRT' else 'was killed'} ({name})"


def _portable(error: BaseException) -> BaseException:
    """The error itself where it survives the journey, else its traceback as text."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return ChildError("".join(traceback.format_exception(error)))


def _serve(descriptor: int, parent: int, memory_limit: int) -> None:
    """The child's life: answer calls until the parent hangs up."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a hung build must not outlive its parent
    if os.getppid() != parent:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    if memory_limit:
        resource.setrlimit(resource.RLIMIT_AS, (memory_limit, memory_limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    connection = Connection(descriptor)
    while True:
        try:
            name, arguments = connection.recv()
        except (EOFError, ConnectionError):
            os._exit(0)  # not every build survives its own exit handlers
        module, _, attribute = name.partition(":")
        try:
            function: Any = importlib.import_module(module)
            for part in attribute.split("."):
                function = getattr(function, part)
            answer = ("value", function(*arguments))
        except BaseException as error:  # all of it is the parent's to judge
            answer = ("raised", _portable(error))
        connection.send(answer)


if __name__ == "__main__":
    # Re-import under the real name, so that what travels is of the classes the parent knows.
    from conformance.harness.engine import child

    child._serve(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
