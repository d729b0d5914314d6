"""A rendezvous of all processes of a job before JAX connects them.

If a process is missing, JAX's own service aborts the others in C++ without naming it. Here, process
0 listens on the coordinator's port until all others have connected, and notifies every process of
errors.
"""

import contextlib
import io
import json
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from ..core._read_json import JSONObject

_LONGEST = 65536  # bytes of a message
_PATIENCE = 5.0  # seconds for one attempt to connect, and for a new connection to identify itself


def meet(coordinator: str, processes: int, process_id: int, timeout: int | float) -> int:
    """Waits until all processes have connected, and returns the number of those on this machine.

    Raises `ValueError`, `TimeoutError`, `ConnectionError` or `OSError`, as documented in
    [`redcoast.initialize`][].
    """
    end = time.monotonic() + timeout
    host, port = split_address(coordinator)
    me = {"process_id": process_id, "processes": processes, "host": socket.gethostname()}
    if process_id > 0:
        return _join(coordinator, me, end, timeout)
    with contextlib.ExitStack() as accepted:  # closes all connections
        with _listen(coordinator, is_loopback(host), port, end) as server:

            def accept() -> socket.socket:
                connection, _ = server.accept()
                return accepted.enter_context(connection)

            members = _gather(server, accept, me, end, timeout)
        # The socket is closed before the others are notified: JAX's service needs its port now.
        count = Counter([me["host"], *(host for _, host in members.values())])
        for connection, host in members.values():
            _tell([connection], start=count[host])
        return count[me["host"]]


def split_address(address: str) -> tuple[str, int]:
    """Splits `host:port`; an IPv6 address is written in brackets."""
    host, colon, port = address.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    number = 0
    if port.isascii() and port.isdigit():
        number = int(port)
    if not colon or not bare or (":" in bare and host == bare) or not 0 < number < 65536:
        raise ValueError(
            "`coordinator` must be host:port, such as 10.0.0.1:1234 or [fe80::1]:1234: the machine "
            f"of process 0 and a free port on it. It is {address!r}."
        )
    return bare, number


def is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def name_processes(numbers: Sequence[int]) -> str:
    """Formats indices as `process 3` or `processes 1 and 2`; of many, names the first few."""
    names = list(map(str, numbers[:8]))
    if len(numbers) > 8:
        names.append(f"{len(numbers) - 8} more")
    *first, last = names
    if not first:
        return f"process {last}"
    return f"processes {', '.join(first)} and {last}"


Members = dict[int, tuple[socket.socket, str]]


def _listen(coordinator: str, loopback: bool, port: int, end: float) -> socket.socket:
    """Opens the server's socket; retries while the port may still be in use by an earlier run."""
    end = min(end, time.monotonic() + 2 * _PATIENCE)
    host = ""  # all interfaces
    if loopback:
        host, _ = split_address(coordinator)
    both = not loopback and socket.has_dualstack_ipv6()
    family = socket.AF_INET
    if both or "[" in coordinator:
        family = socket.AF_INET6
    while True:
        try:
            return socket.create_server(
                (host, port), family=family, backlog=1024, dualstack_ipv6=both
            )
        except OSError as error:
            if time.monotonic() > end:
                raise OSError(
                    f"Process 0 could not listen on port {port} of this machine, "
                    f"{socket.gethostname()}, for the others to join at {coordinator}: {error}. If "
                    "another program uses it, give all processes a coordinator with another port."
                ) from error
        time.sleep(0.2)


def _gather(
    server: socket.socket,
    accept: Callable[[], socket.socket],
    me: JSONObject,
    end: float,
    timeout: int | float,
) -> Members:
    members: Members = {}
    try:
        while missing := [i for i in range(1, me["processes"]) if i not in members]:
            if time.monotonic() > end:
                them = name_processes(missing)
                raise TimeoutError(
                    f"{them[0].upper()}{them[1:]} of {me['processes']} did not join within "
                    f"{timeout:g} s. Process 0 waited on port {server.getsockname()[1]} of "
                    f"{me['host']}. Look at the output of the missing processes: they may not have "
                    "started, may have failed before `initialize`, or may reach another machine at "
                    "the coordinator's address."
                )
            server.settimeout(min(1.0, max(0.01, end - time.monotonic())))
            try:
                _admit(accept(), me, members)
            except TimeoutError:
                _tell([x for x, _ in members.values()], missing=name_processes(missing))
            for number, (connection, _) in list(members.items()):
                if not _is_there(connection):
                    del members[number]  # it may connect again
    except (TimeoutError, ValueError) as error:
        _tell([x for x, _ in members.values()], error=str(error), wrong=type(error) is ValueError)
        raise
    return members


def _admit(connection: socket.socket, me: JSONObject, members: Members) -> None:
    """Adds a new connection to the members if it comes from a process of this job."""
    connection.settimeout(_PATIENCE)
    try:
        other = _read(connection.makefile("rb"))
        number, count, host = int(other["process_id"]), other["processes"], str(other["host"])
    except (OSError, ValueError, TypeError, KeyError):
        return connection.close()  # another program, such as a port scanner
    wrong = ""
    if count != me["processes"]:
        wrong = (
            f"Process {number} on {host} was started as one of {count} processes, but process 0 "
            f"on {me['host']} as one of {me['processes']}. Start all with the same `processes`."
        )
    elif number == 0 or (number in members and _is_there(members[number][0])):
        also = me["host"]
        if number in members:
            _, also = members[number]
        wrong = (
            f"Two processes were started as process {number}, on {also} and on {host}. Give each "
            "process its own `process_id`."
        )
    if wrong:
        _tell([connection], error=wrong, wrong=True)
        raise ValueError(wrong)
    members[number] = connection, host
    _tell([connection], missing="some")


def _is_there(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True  # members wait silently after their first message
    except OSError:
        return False


def _tell(connections: Iterable[socket.socket], **message: object) -> None:
    for connection in connections:
        connection.settimeout(_PATIENCE)
        with contextlib.suppress(OSError):
            connection.sendall(json.dumps(message).encode() + b"\n")


def _read(stream: io.BufferedIOBase) -> JSONObject:
    message = json.loads(stream.readline(_LONGEST) or b"null")
    if not isinstance(message, dict):
        raise ValueError("not a message")
    return message


def _join(coordinator: str, me: JSONObject, end: float, timeout: int | float) -> int:
    reason = "there was no time"
    while (left := end - time.monotonic()) > 0:
        try:
            connection = socket.create_connection(split_address(coordinator), min(left, _PATIENCE))
            with connection:
                connection.sendall(json.dumps(me).encode() + b"\n")
                answer = _answer(connection, end)
        except (OSError, ValueError) as error:
            reason = _why(error)
            time.sleep(0.1)
            continue
        if "start" in answer:
            return answer["start"]
        if "error" in answer:
            if answer["wrong"]:
                raise ValueError(answer["error"])
            raise TimeoutError(answer["error"])
        raise TimeoutError(
            f"Process 0 waits at {coordinator}, but {answer['missing']} of "
            f"{me['processes']} did not join within {timeout:g} s of the start of process "
            f"{me['process_id']}. Look at the output of the missing processes, or pass a longer "
            "`timeout`."
        )
    raise ConnectionError(
        f"Process {me['process_id']}, on {me['host']}, did not reach process 0 at {coordinator} "
        f"within {timeout:g} s: {reason}. The coordinator must be an address of process 0's "
        "machine that the others can reach, and a port that no firewall between them blocks."
    )


def _answer(connection: socket.socket, end: float) -> JSONObject:
    """The final message of process 0: `start`, `error`, or who was missing at the timeout."""
    stream, message = connection.makefile("rb"), {}
    while (left := end - time.monotonic()) > 0 and "missing" in (message or {"missing": ""}):
        connection.settimeout(left)
        try:
            message = _read(stream)
        except TimeoutError:
            break
    if not {"start", "error", "missing"} & message.keys():
        raise ValueError("another program answers there")
    return message


def _why(error: Exception) -> str:
    match error:
        case ConnectionRefusedError():
            return (
                "the machine answers, but nothing listens on that port (process 0 has not "
                "started, has ended, or was given another port)"
            )
        case socket.gaierror():
            return f"no machine of that name is known here ({error})"
        case TimeoutError():
            return "nothing answers (a wrong address, or a firewall)"
        case OSError():
            return str(error)
    return "what answers there is another program, or process 0 has ended"
