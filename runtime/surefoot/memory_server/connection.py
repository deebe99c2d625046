"""Implements a connection to one memory server, with time limits, copy-free reads and translated Redis errors.

Made by the client and by provisioning. Each call ends within its time limit or raises. Nothing is retried here, since
only the caller knows whether repeating a call is safe and worth the time.
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
from surefoot.linux_process import short_socket_path
from surefoot.protocol.identities import LocalMemoryServers, MemoryServerId
from surefoot.settings import JobSettings

_log = logging.getLogger(__name__)


# ---- large values ----------------------------------------------------------------------------------------------------
# Receives long replies directly into the caller's memory. Redis' own parsers read replies in pieces of 32 KiB and copy
# each twice, which costs more than the rest of a read. An unexpected reply is read to its end as usual.

_MAX_LINE_BYTES = 512
"""Longest first line of a reply: a length or an error."""


def set_kernel_timeouts(sock: socket.socket, seconds: float) -> None:
    """Sets the socket's time limits in the kernel.

    Then one call sends or receives megabytes without waking this process for each part. A wait that exceeds `seconds`
    ends with BlockingIOError. TLS sockets are left as they are, because TLS works on records of its own.
    """
    if isinstance(sock, ssl.SSLSocket):
        return
    whole_seconds = int(seconds)
    limit = struct.pack("ll", whole_seconds, max(1, int((seconds - whole_seconds) * 1e6)))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    sock.settimeout(None)


def read_string_into(sock: socket.socket, into: memoryview) -> int:
    """Reads one string reply into `into`; returns the reply's length.

    A shorter string fills the beginning of `into`. Afterwards the socket must be closed, unless the reply had exactly
    that length (`RespConnection.receive_into` does so).

    Raises:
        redis.exceptions.ResponseError: The reply is an error.
        redis.exceptions.ConnectionError: The reply is neither a string that fits nor an error.
    """
    expected = b"$%d\r\n" % len(into)
    head = bytearray(len(expected))
    header_bytes = 0
    while header_bytes < len(head) and b"\r\n" not in head[:header_bytes]:
        header_bytes += _receive_some(sock, memoryview(head)[header_bytes:], 0)
    # the usual case, received directly into the caller's memory
    if head == expected:
        _receive_all(sock, into)
        _read_line_end(sock)
        return len(into)
    return _read_other_reply(sock, bytes(head[:header_bytes]), into)


def _read_other_reply(sock: socket.socket, start: bytes, into: memoryview) -> int:
    """Reads a reply that does not have the expected length: an error, an absent value (length 0) or a shorter string."""
    while b"\r\n" not in start and len(start) < _MAX_LINE_BYTES:
        start += _receive_more(sock)
    text, _, value_start = start.partition(b"\r\n")
    if text[:1] == b"-":
        raise _redis_error(text[1:].decode(errors="replace"))
    if text[:1] != b"$" or not text[1:].lstrip(b"-").isdigit() or int(text[1:]) > len(into):
        raise redis.exceptions.ConnectionError(
            f"it replied {text[:60]!r} where a string of {len(into)} bytes was expected"
        )
    length = max(0, int(text[1:]))
    into[: min(length, len(value_start))] = value_start[:length]
    _receive_all(sock, into[min(length, len(value_start)) : length])
    return length


def _redis_error(text: str) -> Exception:
    """Returns the exception that redis-py makes of this error text, so that callers can handle it by its class."""
    parse: Any = redis.connection.DefaultParser.parse_error  # redis-py leaves it untyped
    error = parse(text)
    assert isinstance(error, Exception)
    return error


def _receive_all(sock: socket.socket, view: memoryview) -> None:
    """Receives bytes until the view is full."""
    flags = 0 if isinstance(sock, ssl.SSLSocket) else socket.MSG_WAITALL
    while view:
        view = view[_receive_some(sock, view, flags) :]


def _read_line_end(sock: socket.socket) -> None:
    """Reads the line end after a string."""
    end = bytearray(2)
    _receive_all(sock, memoryview(end))
    if end != b"\r\n":
        raise redis.exceptions.ConnectionError("a reply is longer than its length field states")


def _receive_more(sock: socket.socket) -> bytes:
    """Receives at least one byte, at most `_MAX_LINE_BYTES`."""
    buffer = bytearray(_MAX_LINE_BYTES)
    return bytes(buffer[: _receive_some(sock, memoryview(buffer), 0)])


def _receive_some(sock: socket.socket, view: memoryview, flags: int) -> int:
    """Receives some bytes into the view and returns their number; raises at the end of the connection."""
    count = sock.recv_into(view, 0, flags)
    if count == 0:
        raise redis.exceptions.ConnectionError("it closed the connection")
    return count


# ---- commands without a connection -----------------------------------------------------------------------------------
# Describes calls to a memory server independently of the connection. A dialogue is a generator that yields commands and
# is sent their replies. So one description of each call serves both an agent's thread (`RespConnection.run_exchange`)
# and the operator's event loop, where a thread per server would let a frozen server delay the others.

T = TypeVar("T")

Command = tuple[Any, ...]
"""A command and its arguments."""
Request = Command | list[Command]
"""A dialogue's request: one command, whose error is raised, or several that are sent together, whose errors are returned
among the replies. An empty list requests nothing, and lets the caller do other work before the dialogue continues."""
Dialogue = Generator[Request, Any, T]
"""Yields requests, is sent replies, and returns the result of the call."""


def run_dialogue(dialogue: Dialogue[T], exchange: Callable[[Request], Any]) -> T:
    """Runs a dialogue to its end, and returns its result; raises the error that the dialogue raises.

    Args:
        dialogue: The call.
        exchange: Sends a request and blocks until its reply.
    """
    try:
        request = next(dialogue)
        while True:
            try:
                reply = exchange(request)
            except Exception as error:  # noqa: BLE001  the dialogue decides about the meaning of an error
                request = dialogue.throw(error)
            else:
                request = dialogue.send(reply)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]  # a generator's value is untyped


def parse_info_section(reply: bytes) -> dict[str, str]:
    """Parses one section of INFO."""
    lines: Sequence[str] = reply.decode().splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)


# ---- connections within a machine ------------------------------------------------------------------------------------
# A memory server on the same node is reached by its Unix socket, where the kernel does none of a network's work for each
# packet. TCP within a machine gets little data in flight: every byte is copied twice between the processes, and the
# second copy finds it in the core's cache with a few hundred kilobytes in flight, but in main memory with the kernel's
# usual megabytes. Congestion control is wasted there, too: BBR, the default of many machines, paces each burst by a
# timer. Both limits together doubled the throughput of two servers on one core. On a network the kernel's own choices
# apply.

MAX_IN_FLIGHT_BYTES = 256 * 1024
"""Send buffer for TCP within a machine; the kernel doubles it. With less, the processes wake each other too often."""

CONGESTION_CONTROL = b"reno"
"""Congestion control for TCP within a machine; every Linux has it and lets every process choose it."""

MAX_LOCAL_ROUND_TRIP_SECONDS = 40e-6
"""Longest round trip that counts as within a machine. A network that is as fast still reaches 25 Gbit/s at this size."""

_TCP_INFO_RTT = 68
"""Offset of the smoothed round trip, in microseconds, in Linux' tcp_info."""


def limit_in_flight_bytes(sock: socket.socket) -> None:
    """Limits the data in flight of a new connection if it ends on this machine.

    Sets send buffer and congestion control; a Unix socket needs neither.
    """
    if sock.family == socket.AF_UNIX or not is_same_machine(sock):
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_IN_FLIGHT_BYTES)
    with contextlib.suppress(OSError):  # an administrator may forbid the choice, which only makes it slower
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, CONGESTION_CONTROL)


def connect_socket(path: str, seconds: float) -> socket.socket:
    """Connects to a server's Unix socket; raises OSError if nothing listens there or the backlog is full."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(seconds)
        with short_socket_path(Path(path)) as name:
            sock.connect(name)
    except OSError:
        sock.close()
        raise
    return sock


def count_fallback(path: str, reason: str) -> None:
    """Counts and logs that TCP is used because the Unix socket failed."""
    from surefoot import metrics  # metrics of the runtime; the operator does not export them

    metrics.fallbacks.labels("memory_socket").inc()
    _warn_once(path, reason)


@cache
def _warn_once(path: str, reason: str) -> None:
    _log.warning(
        "using TCP for this node's memory server, which costs more CPU, because connecting to its socket %s failed: %s."
        " Mount the socket's folder in both pods, or set memoryTier.localSocket to off",
        path,
        reason,
    )


def is_same_machine(sock: socket.socket) -> bool:
    """Returns whether the other end is on this machine.

    That is so if it has this end's address, or if the round trip is too short for a network (a pod of the same node).
    """
    return (
        sock.getsockname()[0] == sock.getpeername()[0] or 0 < round_trip_seconds(sock) <= MAX_LOCAL_ROUND_TRIP_SECONDS
    )


def round_trip_seconds(sock: socket.socket) -> float:
    """Returns the connection's round trip in seconds, as the kernel measured it; 0.0: unknown."""
    tcp_info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_RTT + 4)
    if len(tcp_info) < _TCP_INFO_RTT + 4:
        return 0.0
    (microseconds,) = struct.unpack_from("I", tcp_info, _TCP_INFO_RTT)
    return float(microseconds) / 1e6


# ---- connection ------------------------------------------------------------------------------------------------------

TLS_SERVER_NAME = "surefoot-memory"
"""The name in every memory server's certificate."""


_PARSE_ERRORS = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError)
"""Errors that parsing a malformed reply raises; UnicodeDecodeError is a ValueError."""

_READ_ONLY_ACCOUNT = re.compile(r"permissions to run the '(set|hset)' command", re.IGNORECASE)
"""Error of a server whose job has used up its share and may only read: see `memory_server.provisioning`."""

_MAX_COPIED_BYTES = 6000
"""Arguments longer than this are sent from the caller's memory, not copied into one buffer."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """Authenticates a client at a memory server. Without user and password the server has no accounts (loopback)."""

    user: str = ""
    """Name of the account; empty: the default one."""
    password: str = field(default="", repr=False)
    """Password of the account; empty: none is sent."""
    tls_ca: str = field(default="", repr=False)
    """PEM of the only certificate authority that is trusted; empty: servers with TLS cannot be used."""
    local: LocalMemoryServers | None = None
    """Unix sockets of this node's servers; None: there are none."""

    def socket_path_to(self, server: MemoryServerId) -> str:
        """Returns the path of that server's Unix socket; empty if it can only be reached by its address."""
        return "" if self.local is None else self.local.socket_path_of(server)


def worker_credentials(job: JobSettings) -> Credentials:
    """Returns the account by which a worker's processes use the job's memory servers."""
    return Credentials(job.memory_user, job.memory_password, job.memory_tls_ca, job.local_server)


class RespConnection:
    """A connection to one server, opened at first use and again after a failure.

    Args:
        host: Address for TCP.
        port: Port for TCP.
        credentials: The account.
        call_seconds: Time limit for connecting, for sending one command, and for each wait for bytes of its reply.
        tls: Whether TCP connections use TLS.
        socket_path: The server's Unix socket, which is tried first; empty: it has none on this node.
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
            socket_keepalive=True,  # redis-py also sets TCP_NODELAY
            protocol=2,
            driver_info=None,  # a job's account may not call CLIENT SETINFO
            retry=Retry(NoBackoff(), 0),
            # the C packer copies a memoryview twice; this one passes it to the socket
            command_packer=PythonRespSerializer(_MAX_COPIED_BYTES, _argument_bytes),
        )

    def call(self, *arguments: Any) -> Any:
        """Sends one command and returns Redis' reply: bytes, int, None or a list."""
        self.close_if_pending()
        with self._translated_timeouts():
            self._open_socket()
            self._connection.send_command(*arguments)
            return self._connection.read_response()

    def run_dialogue(self, dialogue: Dialogue[T]) -> T:
        """Runs a dialogue to its end; each of its commands has the time limit of a call."""
        return run_dialogue(dialogue, self._exchange_request)

    def _exchange_request(self, request: Request) -> Any:
        """Sends a request of a dialogue and returns the reply or replies."""
        if not isinstance(request, list):
            return self.call(*request)
        self.close_if_pending()
        for command in request:
            self.send(*command)
        return [self._receive_or_error() for _ in request]

    def _receive_or_error(self) -> Any:
        """Reads a reply; returns an error of the server, and raises an error of the connection."""
        try:
            return self.receive()
        except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError, redis.exceptions.InvalidResponse):
            raise
        except redis.exceptions.ResponseError as error:
            return error

    def send(self, *arguments: Any) -> None:
        """Sends one command whose reply `receive` or `receive_into` reads later; several may be outstanding."""
        with self._translated_timeouts():
            self._open_socket()
            self._connection.send_command(*arguments)
            self._awaited_replies += 1

    def receive_into(self, into: memoryview) -> int:
        """Reads the string reply to the oldest outstanding command into `into`; returns its length.

        Raises:
            redis.exceptions.ConnectionError: The connection failed since the command was sent, or the last reply had
                another length than its `into`: all outstanding commands are lost.
        """
        if not self._awaited_replies or self._connection._sock is None:
            raise redis.exceptions.ConnectionError("the connection was closed after this command was sent")
        is_complete = False
        try:
            with self._translated_timeouts():
                length = read_string_into(self._open_socket(), into)
                is_complete = length == len(into)
                return length
        finally:
            self._awaited_replies -= 1
            if not is_complete:
                self.close()

    @property
    def outstanding_count(self) -> int:
        """Number of commands whose reply was not read yet."""
        return self._awaited_replies

    def receive(self) -> Any:
        """Returns the reply to the oldest outstanding command, in the form of `call`."""
        if not self._awaited_replies or self._connection._sock is None:
            raise redis.exceptions.ConnectionError("the connection was closed after this command was sent")
        with self._translated_timeouts():
            self._awaited_replies -= 1
            return self._connection.read_response()

    def close_if_pending(self) -> None:
        """Closes a connection with unread replies, which the next call would mistake for its own."""
        if self._awaited_replies:
            self.close()

    def info(self, section: str) -> dict[str, str]:
        """Returns one section of INFO."""
        return parse_info_section(self.call("INFO", section))

    def close(self) -> None:
        """Closes the connection; a later call opens another."""
        self._awaited_replies = 0
        self._connection.disconnect()

    def _open_socket(self) -> socket.socket:
        """Opens the connection if needed and returns its socket, with all limits set."""
        # redis-py closes the socket by itself after errors, and with it all outstanding replies are lost
        if self._connection._sock is None:
            self._awaited_replies = 0
            self._connection.connect()
            sock: Any = self._connection._sock
            set_kernel_timeouts(sock, self._call_seconds)
            limit_in_flight_bytes(sock)
        line: socket.socket = self._connection._sock
        return line

    @contextmanager
    def _translated_timeouts(self) -> Iterator[None]:
        """Turns EAGAIN, by which the kernel reports a timeout, into redis' TimeoutError."""
        try:
            yield
        except (redis.exceptions.ConnectionError, BlockingIOError) as error:
            if isinstance(error, BlockingIOError) or isinstance(error.__context__, BlockingIOError):
                self.close()
                raise redis.exceptions.TimeoutError(f"it sent nothing for {self._call_seconds:g} s") from error
            raise
        except (redis.exceptions.InvalidResponse, *_PARSE_ERRORS) as error:
            self.close()  # the start of the next reply is unknown now
            raise redis.exceptions.InvalidResponse(
                f"received data that is no reply of Redis: {_first_line(error)}"
            ) from error


class _Connection(redis.Connection):
    """Connects by the server's Unix socket on this node, else by TCP, with TLS if `authority` is not None.

    The socket needs no TLS, as nothing on it leaves the node. The certificate names the memory tier, not an address,
    because a server's pod changes its address.
    """

    def __init__(self, authority: str | None, socket_path: str, call_seconds: float, **options: Any) -> None:
        self._authority, self._socket_path, self._call_seconds = authority, socket_path, call_seconds
        make: Any = super().__init__
        make(socket_timeout=call_seconds, socket_connect_timeout=call_seconds, **options)

    def _connect(self) -> Any:
        """Connects by the Unix socket if there is one, else by TCP."""
        if not self._socket_path:
            return self._connect_tcp()
        try:
            return connect_socket(self._socket_path, self._call_seconds)
        except OSError as error:
            reason = error.strerror or str(error)
        sock = self._connect_tcp()
        count_fallback(self._socket_path, reason)  # not before: if TCP fails too, the server is just gone
        return sock

    def _connect_tcp(self) -> Any:
        """Connects by TCP, with TLS if an authority is given."""
        make: Any = super()._connect
        if self._authority is None:
            return make()
        if not self._authority:
            raise redis.exceptions.ConnectionError(
                "the server requires TLS, but SUREFOOT_MEMORY_TLS_CA has no certificate authority to verify it"
            )
        context = tls_context(self._authority)
        tcp_socket = make()
        try:
            return context.wrap_socket(tcp_socket, server_hostname=TLS_SERVER_NAME)
        except OSError:  # ssl.SSLError is one
            tcp_socket.close()
            raise


@lru_cache(maxsize=16)
def tls_context(authority: str) -> ssl.SSLContext:
    """Returns the TLS context that trusts this authority alone."""
    try:
        context = ssl.create_default_context(cadata=authority)
    except ssl.SSLError as error:
        raise ConfigurationError(
            f"the certificate authority of the memory tier is not a PEM certificate: {error}"
        ) from error
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


@contextmanager
def translate_parse_errors(where: str, doing: str) -> Iterator[None]:
    """Turns the error of a malformed reply into InvalidServerReply."""
    try:
        yield
    except (InvalidServerReply, *_PARSE_ERRORS) as error:
        if isinstance(error, InvalidServerReply):
            raise
        raise InvalidServerReply(
            f"{where} sent an invalid reply while {doing} ({type(error).__name__}: {_first_line(error)}): one of its keys was"
            " overwritten or damaged; restart that Redis, the other copies are not affected"
        ) from error


@contextmanager
def translate_redis_errors(where: str, doing: str) -> Iterator[None]:
    """Turns Redis' errors into TierError and its subclasses.

    Args:
        where: The server, for the message.
        doing: The call as a present participle, for the message.
    """
    try:
        yield
    except redis.exceptions.OutOfMemoryError as error:
        raise TierFull(
            f"{where} is full while {doing}: increase its size, keep fewer checkpoints or add nodes"
        ) from error
    except redis.exceptions.NoPermissionError as error:
        if _READ_ONLY_ACCOUNT.search(str(error)):
            raise TierFull(
                f"{where} accepts no more data of this job while {doing}: the job has used up its share there; keep fewer"
                " checkpoints, or increase its sizeLimit or the memory tier's size"
            ) from error
        raise _access_denied(where, doing, error) from error
    except redis.exceptions.AuthenticationError as error:
        raise _access_denied(where, doing, error) from error
    except redis.exceptions.NoScriptError as error:
        raise TierUnavailable(f"{where} lost its scripts while {doing}: the operator will load them again") from error
    except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError, OSError) as error:
        if _is_distrusted(error):
            raise AccessDenied(
                f"{where} has a certificate of another authority while {doing}: {_first_line(error)}"
            ) from error
        raise TierUnavailable(f"{where} does not answer while {doing}: {_first_line(error)}") from error
    except redis.exceptions.InvalidResponse as error:
        raise InvalidServerReply(f"{where} does not reply like a Redis while {doing}: {_first_line(error)}") from error
    except redis.exceptions.ResponseError as error:
        if str(error).startswith(("NOAUTH", "WRONGPASS")):
            raise AccessDenied(f"{where} rejects this account while {doing}: {_first_line(error)}") from error
        if str(error).startswith(("BUSY", "LOADING", "MISCONF", "READONLY", "MASTERDOWN")):
            raise TierUnavailable(f"{where} cannot serve now while {doing}: {_first_line(error)}") from error
        if str(error).startswith("WRONGTYPE") or "WRONGTYPE" in str(error):
            raise InvalidServerReply(
                f"{where} has a key of the wrong type while {doing}: it was overwritten; restart that Redis, the other"
                " copies are not affected"
            ) from error
        raise TierError(f"{where} rejected {doing}: {_first_line(error)}") from error


def _access_denied(where: str, doing: str, error: Exception) -> AccessDenied:
    """Returns the error for a rejected account, with its possible causes."""
    return AccessDenied(
        f"{where} rejects this account while {doing} ({_first_line(error)}): it restarted, is not yet provisioned, or the"
        " password was changed"
    )


def _is_distrusted(error: BaseException | None) -> bool:
    """Returns whether a certificate was presented whose authority is not trusted here."""
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _argument_bytes(value: Any) -> bytes | memoryview:
    """Converts an argument of a command to bytes; a memoryview stays as it is."""
    if isinstance(value, (bytes, memoryview)):
        return value
    return str(value).encode() if isinstance(value, (str, int)) else bytes(value)


def _first_line(error: BaseException) -> str:
    """Returns the first line of an error, at most 200 characters; Redis' texts never contain a password."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
