"""Retries of requests to a storage service: which errors are retried, and for how long."""

from __future__ import annotations

import errno
import logging
import random
import time
from collections.abc import Callable
from typing import TypeVar

RETRY_SECONDS = 120.0
"""How long a request that fails is retried."""
_FIRST_DELAY, _LONGEST_DELAY = 0.25, 15.0
_PERMANENT = (
    PermissionError,
    FileNotFoundError,
    FileExistsError,
    IsADirectoryError,
    NotADirectoryError,
    NotImplementedError,
    ImportError,
    TypeError,
    ValueError,
    AttributeError,
    LookupError,
)
_CREDENTIALS = {
    "NoCredentialsError",
    "PartialCredentialsError",
    "CredentialRetrievalError",
    "ProfileNotFound",
    "TokenRetrievalError",
    "UnauthorizedSSOTokenError",
    "DefaultCredentialsError",
    "RefreshError",
}
"""Names of the errors of the services' libraries that say that there are no usable credentials."""

_spread = random.SystemRandom()
"""Spreads requests in time. Draws from the global generator would change the seeds and shuffles of the program."""

log = logging.getLogger("tfdist")
Result = TypeVar("Result")


class StorageError(OSError):
    """A request to a storage service failed, also when it was repeated."""

    def __init__(self, message: str) -> None:
        super().__init__(errno.EIO, message)

    def __str__(self) -> str:
        return str(self.strerror)


class Retry:
    """Repeats requests that fail for a reason that may pass: time-outs, lost connections, errors of the service.

    Args:
        seconds: how long a request that fails is repeated; by default `RETRY_SECONDS`.
        clock: returns the time in seconds.
        sleep: waits for some seconds.
    """

    def __init__(
        self,
        seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._seconds = RETRY_SECONDS if seconds is None else seconds
        self._clock = clock
        self._sleep = sleep

    def __call__(self, what: str, request: Callable[[], Result]) -> Result:
        """Returns the result of a request.

        Args:
            what: what the request does, for messages.
            request: sends the request; it may be called several times.

        Raises:
            FileNotFoundError: there is no such object or bucket.
            PermissionError: access is denied, or there are no credentials.
            StorageError: the request failed for another reason, until the limit.
        """
        delay, deadline = _FIRST_DELAY, 0.0
        while True:
            try:
                return request()
            except Exception as error:
                _raise_if_permanent(what, error)
                now = self._clock()
                if not deadline:
                    deadline = now + self._seconds
                    log.warning("%s failed: %s; it is retried for %.0f s", what, reason_of(error), self._seconds)
                if now >= deadline:
                    message = f"{what} failed for {self._seconds:.0f} s: {reason_of(error)}"
                    raise StorageError(message) from error
                wait = min(delay * _spread.uniform(0.75, 1.25), deadline - now)
            self._sleep(wait)
            delay = min(2 * delay, _LONGEST_DELAY)


def _raise_if_permanent(what: str, error: Exception) -> None:
    if type(error).__name__ in _CREDENTIALS:
        raise PermissionError(errno.EACCES, f"{what} failed: {reason_of(error)}") from error
    if isinstance(error, (FileNotFoundError, PermissionError)):
        number = errno.ENOENT if isinstance(error, FileNotFoundError) else errno.EACCES
        raise type(error)(number, f"{what} failed: {reason_of(error)}") from error
    if isinstance(error, _PERMANENT):
        raise StorageError(f"{what} failed: {reason_of(error)}") from error


def reason_of(error: BaseException) -> str:
    """Returns an error's text, after its class if the text alone may say too little."""
    text, kind = str(error), type(error).__name__
    if isinstance(error, StorageError):
        return text
    return f"{kind}: {text}" if text else kind
