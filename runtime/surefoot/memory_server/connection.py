"""Connects to one holder: time limits, no copies, Redis errors translated.

Built by the client and by provisioning. A call either ends within its limit or raises; nothing is retried here, since
only the caller knows whether repeating is safe and worth the time.
"""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar

import redis
from redis.backoff import NoBackoff
from redis.connection import PythonRespSerializer
from redis.retry import Retry

from surefoot.errors import AccessRefused, ConfigurationError, HolderDamaged, TierError, TierFull, TierUnavailable
from surefoot.memory_server import nearby
from surefoot.memory_server.bulk import limit_by_kernel, reply_into
from surefoot.memory_server.dialogue import Asked, Dialogue, driven, section_of
from surefoot.protocol.identities import LocalHolder, ServerId
from surefoot.settings import JobSettings

TLS_NAME = "surefoot-memory"
"""What every holder's certificate names."""

T = TypeVar("T")

_NO_REPLY = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError)
"""What reading a reply raises that is not of the shape it should have. UnicodeDecodeError is a ValueError."""

_CLOSED = re.compile(r"permissions to run the '(set|hset)' command", re.IGNORECASE)
"""What a server says to an account that may read and not write: see `memory_server.holding`."""

_WHOLE_BUFFER = 6000
"""Arguments longer than this are sent from where they lie, not joined into one string."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """Authenticates on a holder.

    The empty user with an empty password means a server without accounts (loopback).
    """

    user: str = ""
    password: str = field(default="", repr=False)
    tls_ca: str = field(default="", repr=False)
    """PEM of the authority by which a holder that speaks TLS proves itself; nothing else is trusted."""
    local: LocalHolder | None = None
    """The holders that are reached by a socket of this node, if they have one."""

    def socket_to(self, server: ServerId) -> str:
        """Returns the path of the socket to that server.

        Empty: it is reached by its address alone.
        """
        return "" if self.local is None else self.local.socket_of(server)


def account_of(job: JobSettings) -> Credentials:
    """The account by which a worker's processes reach the job's holders."""
    return Credentials(job.holder_user, job.holder_password, job.holder_tls_ca, job.local_holder)


class Wire:
    """Keeps one connection to a server, opened at first use.

    One that failed is opened anew. `call_seconds` limits connecting, sending one command, and each wait for bytes of
    its reply. `socket_path`: the server's socket on this node, tried first.
    """

    def __init__(
        self,
        host: str,
        port: int,
        credentials: Credentials,
        call_seconds: float,
        tls: bool = False,
        socket_path: str = "",
    ) -> None:
        self._call_seconds = call_seconds
        self._asked = 0
        make: Any = _Connection  # redis-py leaves its methods untyped
        self._connection = make(
            credentials.tls_ca if tls else None,
            socket_path,
            call_seconds,
            host=host,
            port=port,
            username=credentials.user or None,
            password=credentials.password or None,
            socket_keepalive=True,  # and redis-py sets TCP_NODELAY
            protocol=2,
            driver_info=None,  # CLIENT SETINFO is not on a job's list of commands
            retry=Retry(NoBackoff(), 0),
            # the C packer copies a memoryview twice; this one hands it to the socket
            command_packer=PythonRespSerializer(_WHOLE_BUFFER, _as_bytes),
        )

    def call(self, *arguments: Any) -> Any:
        """Sends one command and returns Redis' reply: bytes, int, None or list."""
        self.forget()
        with self._limited():
            self._line()
            self._connection.send_command(*arguments)
            return self._connection.read_response()

    def converse(self, dialogue: Dialogue[T]) -> T:
        """Carries out a dialogue; every exchange has the call's time limit."""
        return driven(dialogue, self._exchange)

    def _exchange(self, asked: Asked) -> Any:
        if not isinstance(asked, list):
            return self.call(*asked)
        self.forget()
        for command in asked:
            self.ask(*command)
        return [self._answer_or_error() for _ in asked]

    def _answer_or_error(self) -> Any:
        try:
            return self.answer()
        except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError, redis.exceptions.InvalidResponse):
            raise
        except redis.exceptions.ResponseError as error:
            return error

    def ask(self, *arguments: Any) -> None:
        """Sends one command whose reply `take` or `answer` reads later.

        Several may be under way.
        """
        with self._limited():
            self._line()
            self._connection.send_command(*arguments)
            self._asked += 1

    def take(self, into: memoryview) -> int:
        """Reads the reply to the oldest `ask` into `into`; returns its length.

        The reply is a string, no longer than `into`. A connection that failed since, or whose last reply was of another
        length, has lost its requests: redis' ConnectionError.
        """
        if not self._asked or self._connection._sock is None:
            raise redis.exceptions.ConnectionError("the connection was closed since this was asked for")
        whole = False
        try:
            with self._limited():
                length = reply_into(self._line(), into)
                whole = length == len(into)
                return length
        finally:
            self._asked -= 1
            if not whole:
                self.close()

    @property
    def due(self) -> int:
        """Number of replies under way."""
        return self._asked

    def answer(self) -> Any:
        """The reply to the oldest command asked for, as `call` returns it."""
        if not self._asked or self._connection._sock is None:
            raise redis.exceptions.ConnectionError("the connection was closed since this was asked for")
        with self._limited():
            self._asked -= 1
            return self._connection.read_response()

    def forget(self) -> None:
        """Closes a connection with unread replies: another call would read them."""
        if self._asked:
            self.close()

    def info(self, section: str) -> dict[str, str]:
        """INFO of one section as a mapping."""
        return section_of(self.call("INFO", section))

    def close(self) -> None:
        """Closes the connection; a later call opens another."""
        self._asked = 0
        self._connection.disconnect()

    def _line(self) -> socket.socket:
        """The open connection, its limits set once."""
        if self._connection._sock is None:
            self._asked = 0
            self._connection.connect()
            opened: Any = self._connection._sock
            limit_by_kernel(opened, self._call_seconds)
            nearby.limit_under_way(opened)
        line: socket.socket = self._connection._sock
        return line

    @contextmanager
    def _limited(self) -> Iterator[None]:
        """Turns EAGAIN, the kernel's answer after a time limit, into redis' TimeoutError."""
        try:
            yield
        except (redis.exceptions.ConnectionError, BlockingIOError) as error:
            if isinstance(error, BlockingIOError) or isinstance(error.__context__, BlockingIOError):
                self.close()
                raise redis.exceptions.TimeoutError(f"nothing for {self._call_seconds:g} s") from error
            raise
        except (redis.exceptions.InvalidResponse, *_NO_REPLY) as error:
            self.close()  # where the next reply begins nobody knows
            raise redis.exceptions.InvalidResponse(f"no reply of a Redis: {_short(error)}") from error


class _Connection(redis.Connection):
    """By the server's socket on this node, else by TCP: over TLS if `authority` is not None.

    The socket is in clear in any case, as nothing on it leaves the node. The certificate of a server that speaks TLS
    names the memory tier, not the address that its pod has today.
    """

    def __init__(self, authority: str | None, socket_path: str, call_seconds: float, **options: Any) -> None:
        self._authority, self._socket_path, self._call_seconds = authority, socket_path, call_seconds
        make: Any = super().__init__
        make(socket_timeout=call_seconds, socket_connect_timeout=call_seconds, **options)

    def _connect(self) -> Any:
        if not self._socket_path:
            return self._connect_far()
        try:
            return nearby.connect(self._socket_path, self._call_seconds)
        except OSError as error:
            why = error.strerror or str(error)
        opened = self._connect_far()
        nearby.count_fallback(self._socket_path, why)  # only now: a server that is gone has no second-best way
        return opened

    def _connect_far(self) -> Any:
        make: Any = super()._connect
        if self._authority is None:
            return make()
        if not self._authority:
            raise redis.exceptions.ConnectionError(
                "it speaks TLS, and no authority was given to verify it by (SUREFOOT_HOLDER_TLS_CA)"
            )
        context = trust(self._authority)
        plain = make()
        try:
            return context.wrap_socket(plain, server_hostname=TLS_NAME)
        except OSError:  # ssl.SSLError is one
            plain.close()
            raise


@lru_cache(maxsize=16)
def trust(authority: str) -> ssl.SSLContext:
    """Returns what verifies a holder's certificate: this authority alone."""
    try:
        context = ssl.create_default_context(cadata=authority)
    except ssl.SSLError as error:
        raise ConfigurationError(f"the memory tier's authority is no certificate in PEM form: {error}") from error
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


@contextmanager
def understood(where: str, doing: str) -> Iterator[None]:
    """Turns a reply that cannot be parsed into HolderDamaged."""
    try:
        yield
    except (HolderDamaged, *_NO_REPLY) as error:
        if isinstance(error, HolderDamaged):
            raise
        raise HolderDamaged(
            f"{where} answered what no holder answers while {doing} ({type(error).__name__}: {_short(error)}): a key of it"
            " was overwritten or damaged; restart that Redis, the other copies stay"
        ) from error


@contextmanager
def explained(where: str, doing: str) -> Iterator[None]:
    """Turns Redis' errors into TierUnavailable, TierFull, TierError or their like.

    The message says where, and while doing what.
    """
    try:
        yield
    except redis.exceptions.OutOfMemoryError as error:
        raise TierFull(f"{where} is full while {doing}: raise its size, keep fewer checkpoints or add nodes") from error
    except redis.exceptions.NoPermissionError as error:
        if _CLOSED.search(str(error)):
            raise TierFull(
                f"{where} takes nothing of this job while {doing}: it holds more than its part there; keep fewer"
                " checkpoints, or raise its sizeLimit or the memory tier's size"
            ) from error
        raise _refused(where, doing, error) from error
    except redis.exceptions.AuthenticationError as error:
        raise _refused(where, doing, error) from error
    except redis.exceptions.NoScriptError as error:
        raise TierUnavailable(f"{where} lost its scripts while {doing}: it waits for the operator") from error
    except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError, OSError) as error:
        if _is_distrusted(error):
            raise AccessRefused(f"{where} proves itself by another authority while {doing}: {_short(error)}") from error
        raise TierUnavailable(f"{where} does not answer while {doing}: {_short(error)}") from error
    except redis.exceptions.InvalidResponse as error:
        raise HolderDamaged(f"{where} does not speak like a Redis while {doing}: {_short(error)}") from error
    except redis.exceptions.ResponseError as error:
        if str(error).startswith(("NOAUTH", "WRONGPASS")):
            raise AccessRefused(f"{where} refuses this account while {doing}: {_short(error)}") from error
        if str(error).startswith(("BUSY", "LOADING", "MISCONF", "READONLY", "MASTERDOWN")):
            raise TierUnavailable(f"{where} cannot serve now while {doing}: {_short(error)}") from error
        if str(error).startswith("WRONGTYPE") or "WRONGTYPE" in str(error):
            raise HolderDamaged(
                f"{where} has a key of another type than a holder's while {doing}: it was overwritten; restart that Redis,"
                " the other copies stay"
            ) from error
        raise TierError(f"{where} refused while {doing}: {_short(error)}") from error


def _refused(where: str, doing: str, error: Exception) -> AccessRefused:
    return AccessRefused(
        f"{where} refuses this account while {doing} ({_short(error)}): it restarted, is not provisioned yet, or the"
        " password was changed"
    )


def _is_distrusted(error: BaseException | None) -> bool:
    """Whether a certificate was presented and is not that of an authority that is known here."""
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _as_bytes(value: Any) -> bytes | memoryview:
    if isinstance(value, (bytes, memoryview)):
        return value
    return str(value).encode() if isinstance(value, (str, int)) else bytes(value)


def _short(error: BaseException) -> str:
    """The first line; Redis' texts never carry a password."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
