"""Connects to one memory server: time limits, reads without copies, Redis errors translated.

Built by the client and by provisioning. A call either ends within its limit or raises; nothing is retried here, since
only the caller knows whether repeating is safe and worth the time.
"""

from __future__ import annotations

import contextlib
import logging
import re
import socket
import ssl
import struct
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, TypeVar

import redis
from redis.backoff import NoBackoff
from redis.connection import PythonRespSerializer
from redis.retry import Retry

from surefoot.errors import AccessDenied, ConfigurationError, InvalidServerReply, TierError, TierFull, TierUnavailable
from surefoot.linux_process import reachable
from surefoot.protocol.identities import LocalMemoryServers, MemoryServerId
from surefoot.settings import JobSettings

_log = logging.getLogger(__name__)


# ---- large values ----------------------------------------------------------------------------------------------------
# Receives long replies straight into the caller's memory. Redis' own parsers take replies in pieces of 32 KiB and copy
# each twice, which costs more than everything else about a read. A reply that is not the one expected is read to its
# end like any other.

_MAX_LINE_BYTES = 512


def limit_by_kernel(line: socket.socket, seconds: float) -> None:
    """Sets the socket's time limits in the kernel.

    One call then sends or receives megabytes without waking this process for each part. Each wait ends after `seconds`
    with BlockingIOError. TLS has records of its own and stays as it is.
    """
    if isinstance(line, ssl.SSLSocket):
        return
    whole = int(seconds)
    limit = struct.pack("ll", whole, max(1, int((seconds - whole) * 1e6)))
    line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    line.settimeout(None)


def reply_into(line: socket.socket, into: memoryview) -> int:
    """Reads one string reply into `into`; returns the reply's length.

    A shorter string fills the beginning of `into`. Raises redis' ResponseError for an error reply, ConnectionError for
    anything else; after either, and after another length, the socket must be closed (`Wire.take` does).
    """
    expected = b"$%d\r\n" % len(into)
    head = bytearray(len(expected))
    seen = 0
    while seen < len(head) and b"\r\n" not in head[:seen]:
        seen += _received(line, memoryview(head)[seen:], 0)
    if head == expected:
        _fill(line, into)
        _end(line)
        return len(into)
    return _other_reply(line, bytes(head[:seen]), into)


def _other_reply(line: socket.socket, start: bytes, into: memoryview) -> int:
    """An error, an absent value, or a shorter string."""
    while b"\r\n" not in start and len(start) < _MAX_LINE_BYTES:
        start += _more(line)
    text, _, rest = start.partition(b"\r\n")
    if text[:1] == b"-":
        raise _error(text[1:].decode(errors="replace"))
    if text[:1] != b"$" or not text[1:].lstrip(b"-").isdigit() or int(text[1:]) > len(into):
        raise redis.exceptions.ConnectionError(f"it answered {text[:60]!r} where {len(into)} bytes were expected")
    length = max(0, int(text[1:]))
    into[: min(length, len(rest))] = rest[:length]
    _fill(line, into[min(length, len(rest)) : length])
    return length


def _error(text: str) -> Exception:
    """The class that redis-py gives an error of this text, so that callers tell them apart as everywhere."""
    parse: Any = redis.connection.DefaultParser.parse_error  # redis-py leaves it untyped
    found = parse(text)
    assert isinstance(found, Exception)
    return found


def _fill(line: socket.socket, view: memoryview) -> None:
    whole = 0 if isinstance(line, ssl.SSLSocket) else socket.MSG_WAITALL
    while view:
        view = view[_received(line, view, whole) :]


def _end(line: socket.socket) -> None:
    end = bytearray(2)
    _fill(line, memoryview(end))
    if end != b"\r\n":
        raise redis.exceptions.ConnectionError("a reply did not end where its length said")


def _more(line: socket.socket) -> bytes:
    more = bytearray(_MAX_LINE_BYTES)
    return bytes(more[: _received(line, memoryview(more), 0)])


def _received(line: socket.socket, view: memoryview, flags: int) -> int:
    count = line.recv_into(view, 0, flags)
    if count == 0:
        raise redis.exceptions.ConnectionError("it closed the connection")
    return count


# ---- commands without a connection -----------------------------------------------------------------------------------
# Describes what is said to a holder, without a connection. A dialogue yields commands and is sent their replies. One
# text of each call so serves an agent's thread (`Wire.converse`) and the operator's event loop, where a thread for each
# holder would let one that is frozen delay the others.

T = TypeVar("T")

Command = tuple[Any, ...]
Reply = Command | list[Command]
"""One command, whose error is raised; or several that travel together, whose errors are among the replies. An empty list
asks nothing: whoever carries out the dialogue may do something else before it goes on."""
Dialogue = Generator[Reply, Any, T]


def run_exchange(dialogue: Dialogue[T], exchange: Callable[[Reply], Any]) -> T:
    """Carries a dialogue to its end; `exchange` blocks until the reply.

    Raises what the dialogue makes of an error.
    """
    try:
        asked = next(dialogue)
        while True:
            try:
                reply = exchange(asked)
            except Exception as error:  # noqa: BLE001  what an error means the dialogue says
                asked = dialogue.throw(error)
            else:
                asked = dialogue.send(reply)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]  # a generator's value is untyped


def section_of(reply: bytes) -> dict[str, str]:
    """Reads one section of INFO as a mapping."""
    lines: Sequence[str] = reply.decode().splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)


# ---- connections within a machine ------------------------------------------------------------------------------------
# Detects whether a connection ends on this machine. A holder of this node is reached by its Unix socket, where the
# kernel does none of a network's work for each packet. What reaches this machine by TCP has little under way at once.
# Between two processes of one machine a byte is copied twice. With the kernel's usual megabytes under way the second
# copy finds it in main memory; with a few hundred kilobytes it finds it in the core's cache. And what a network needs
# against congestion costs there: BBR, the default of many machines, paces each burst by a timer. Both together doubled
# what two holders took with one core (docs/measuring.md). On a network the kernel goes on choosing.

UNDER_WAY_BYTES = 256 * 1024
"""The kernel doubles it for its own needs. Less makes the two processes wake each other too often."""

CONGESTION = b"reno"
"""Every Linux has it, and lets every process choose it."""

NEAR_SECONDS = 40e-6
"""A round trip of no network but a very near one, which at this size still carries 25 Gbit/s."""

_TCP_INFO_RTT = 68
"""Where Linux' tcp_info has the smoothed round trip, in microseconds."""


def limit_under_way(line: socket.socket) -> None:
    """Limits an open connection's bytes under way, within this machine.

    Called once: sets send buffer and congestion control. TLS on top changes nothing; a Unix socket buffers as little.
    """
    if line.family == socket.AF_UNIX or not is_near(line):
        return
    line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNDER_WAY_BYTES)
    with contextlib.suppress(OSError):  # an administrator may forbid the choice: it is slower then, and nothing else
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, CONGESTION)


def connect_socket(path: str, seconds: float) -> socket.socket:
    """Connects to the server's Unix socket without waiting.

    Raises OSError where nobody listens, or the backlog is full.
    """
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        line.settimeout(seconds)
        with reachable(Path(path)) as name:
            line.connect(name)
    except OSError:
        line.close()
        raise
    return line


def count_fallback(path: str, why: str) -> None:
    """Counts and logs a connection by TCP instead of the socket."""
    from surefoot import metrics  # of the runtime: an operator that reads holders exports none of them

    metrics.fallbacks.labels("memory_socket").inc()
    _warn_once(path, why)


@cache
def _warn_once(path: str, why: str) -> None:
    _log.warning(
        "this node's holder is reached by TCP, which costs more: its socket %s cannot be connected: %s. Let its folder"
        " be mounted in both pods, or switch memoryTier.localSocket off",
        path,
        why,
    )


def is_near(line: socket.socket) -> bool:
    """Returns whether the other end is on this machine.

    It has this end's address, or a round trip as short as only within a machine (a pod of the same node).
    """
    return line.getsockname()[0] == line.getpeername()[0] or 0 < round_trip_seconds(line) <= NEAR_SECONDS


def round_trip_seconds(line: socket.socket) -> float:
    """The connection's round trip as the kernel measured it; 0.0: unknown."""
    told = line.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_RTT + 4)
    if len(told) < _TCP_INFO_RTT + 4:
        return 0.0
    (microseconds,) = struct.unpack_from("I", told, _TCP_INFO_RTT)
    return float(microseconds) / 1e6


# ---- connection ------------------------------------------------------------------------------------------------------

TLS_NAME = "surefoot-memory"
"""What every holder's certificate names."""


_NO_REPLY = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError)
"""What reading a reply raises that is not of the shape it should have. UnicodeDecodeError is a ValueError."""

_CLOSED = re.compile(r"permissions to run the '(set|hset)' command", re.IGNORECASE)
"""What a server says to an account that may read and not write: see `memory_server.provisioning`."""

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
    local: LocalMemoryServers | None = None
    """The holders that are reached by a socket of this node, if they have one."""

    def socket_to(self, server: MemoryServerId) -> str:
        """Returns the path of the socket to that server.

        Empty: it is reached by its address alone.
        """
        return "" if self.local is None else self.local.socket_of(server)


def account_of(job: JobSettings) -> Credentials:
    """The account by which a worker's processes reach the job's holders."""
    return Credentials(job.memory_user, job.memory_password, job.memory_tls_ca, job.local_server)


class RespConnection:
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
        self._awaited_replies = 0
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
        self.close_if_pending()
        with self._limited():
            self._connected()
            self._connection.send_command(*arguments)
            return self._connection.read_response()

    def run_exchange(self, dialogue: Dialogue[T]) -> T:
        """Carries out a dialogue; every exchange has the call's time limit."""
        return run_exchange(dialogue, self._exchange)

    def _exchange(self, asked: Reply) -> Any:
        if not isinstance(asked, list):
            return self.call(*asked)
        self.close_if_pending()
        for command in asked:
            self.send(*command)
        return [self._answer_or_error() for _ in asked]

    def _answer_or_error(self) -> Any:
        try:
            return self.receive()
        except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError, redis.exceptions.InvalidResponse):
            raise
        except redis.exceptions.ResponseError as error:
            return error

    def send(self, *arguments: Any) -> None:
        """Sends one command whose reply `take` or `answer` reads later.

        Several may be under way.
        """
        with self._limited():
            self._connected()
            self._connection.send_command(*arguments)
            self._awaited_replies += 1

    def receive_into(self, into: memoryview) -> int:
        """Reads the reply to the oldest `ask` into `into`; returns its length.

        The reply is a string, no longer than `into`. A connection that failed since, or whose last reply was of another
        length, has lost its requests: redis' ConnectionError.
        """
        if not self._awaited_replies or self._connection._sock is None:
            raise redis.exceptions.ConnectionError("the connection was closed since this was asked for")
        whole = False
        try:
            with self._limited():
                length = reply_into(self._connected(), into)
                whole = length == len(into)
                return length
        finally:
            self._awaited_replies -= 1
            if not whole:
                self.close()

    @property
    def due(self) -> int:
        """Number of replies under way."""
        return self._awaited_replies

    def receive(self) -> Any:
        """The reply to the oldest command asked for, as `call` returns it."""
        if not self._awaited_replies or self._connection._sock is None:
            raise redis.exceptions.ConnectionError("the connection was closed since this was asked for")
        with self._limited():
            self._awaited_replies -= 1
            return self._connection.read_response()

    def close_if_pending(self) -> None:
        """Closes a connection with unread replies: another call would read them."""
        if self._awaited_replies:
            self.close()

    def info(self, section: str) -> dict[str, str]:
        """INFO of one section as a mapping."""
        return section_of(self.call("INFO", section))

    def close(self) -> None:
        """Closes the connection; a later call opens another."""
        self._awaited_replies = 0
        self._connection.disconnect()

    def _connected(self) -> socket.socket:
        """The open connection, its limits set once."""
        if self._connection._sock is None:
            self._awaited_replies = 0
            self._connection.connect()
            opened: Any = self._connection._sock
            limit_by_kernel(opened, self._call_seconds)
            limit_under_way(opened)
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
            return connect_socket(self._socket_path, self._call_seconds)
        except OSError as error:
            why = error.strerror or str(error)
        opened = self._connect_far()
        count_fallback(self._socket_path, why)  # only now: a server that is gone has no second-best way
        return opened

    def _connect_far(self) -> Any:
        make: Any = super()._connect
        if self._authority is None:
            return make()
        if not self._authority:
            raise redis.exceptions.ConnectionError(
                "it speaks TLS, and no authority was given to verify it by (SUREFOOT_MEMORY_TLS_CA)"
            )
        context = tls_context(self._authority)
        plain = make()
        try:
            return context.wrap_socket(plain, server_hostname=TLS_NAME)
        except OSError:  # ssl.SSLError is one
            plain.close()
            raise


@lru_cache(maxsize=16)
def tls_context(authority: str) -> ssl.SSLContext:
    """Returns what verifies a holder's certificate: this authority alone."""
    try:
        context = ssl.create_default_context(cadata=authority)
    except ssl.SSLError as error:
        raise ConfigurationError(f"the memory tier's authority is no certificate in PEM form: {error}") from error
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


@contextmanager
def translate_parse_errors(where: str, doing: str) -> Iterator[None]:
    """Turns a reply that cannot be parsed into HolderDamaged."""
    try:
        yield
    except (InvalidServerReply, *_NO_REPLY) as error:
        if isinstance(error, InvalidServerReply):
            raise
        raise InvalidServerReply(
            f"{where} answered what no holder answers while {doing} ({type(error).__name__}: {_short(error)}): a key of it"
            " was overwritten or damaged; restart that Redis, the other copies stay"
        ) from error


@contextmanager
def translate_redis_errors(where: str, doing: str) -> Iterator[None]:
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
        raise _rejected(where, doing, error) from error
    except redis.exceptions.AuthenticationError as error:
        raise _rejected(where, doing, error) from error
    except redis.exceptions.NoScriptError as error:
        raise TierUnavailable(f"{where} lost its scripts while {doing}: it waits for the operator") from error
    except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError, OSError) as error:
        if _is_distrusted(error):
            raise AccessDenied(f"{where} proves itself by another authority while {doing}: {_short(error)}") from error
        raise TierUnavailable(f"{where} does not answer while {doing}: {_short(error)}") from error
    except redis.exceptions.InvalidResponse as error:
        raise InvalidServerReply(f"{where} does not speak like a Redis while {doing}: {_short(error)}") from error
    except redis.exceptions.ResponseError as error:
        if str(error).startswith(("NOAUTH", "WRONGPASS")):
            raise AccessDenied(f"{where} refuses this account while {doing}: {_short(error)}") from error
        if str(error).startswith(("BUSY", "LOADING", "MISCONF", "READONLY", "MASTERDOWN")):
            raise TierUnavailable(f"{where} cannot serve now while {doing}: {_short(error)}") from error
        if str(error).startswith("WRONGTYPE") or "WRONGTYPE" in str(error):
            raise InvalidServerReply(
                f"{where} has a key of another type than a holder's while {doing}: it was overwritten; restart that Redis,"
                " the other copies stay"
            ) from error
        raise TierError(f"{where} refused while {doing}: {_short(error)}") from error


def _rejected(where: str, doing: str, error: Exception) -> AccessDenied:
    return AccessDenied(
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
