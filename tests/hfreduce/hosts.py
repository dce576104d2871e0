"""Network namespaces as hosts: several "machines" on this one, with links of a given rate that can be cut.

    with hosts(2, rate=1e9) as h:
        ranks.run(WORKER, "reduces", 4, tmp_path, prefix=lambda rank: h.prefix(rank // 2))

Each host has its own network and host name, "host0", "host1", ...; its eth0 is a veth whose other end is on a bridge in
one more namespace. `rate` shapes both directions of every link with tbf. Everything is set up through rtnetlink, so
iproute2 is not needed. Only descriptors of this process keep it alive: when the process ends, however it ends, all is
gone. Needs root (CAP_SYS_ADMIN and CAP_NET_ADMIN), nsenter, and a kernel with veth, bridge and sch_tbf; otherwise tests
skip and say so.
"""

import contextlib
import ctypes
import errno
import os
import socket
import struct
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

NEW_UTS, NEW_NET = 0x04000000, 0x40000000  # sched.h
NEWLINK, NEWADDR, NEWQDISC = 16, 20, 36  # linux/rtnetlink.h
REQUEST, ACK, CREATE, EXCLUSIVE = 1, 4, 0x400, 0x200  # linux/netlink.h
UP = 1
ETHERNET = 1  # the link layer of a rate; without it tbf requires a table
# Not root, or a kernel without a feature. An unknown kind of qdisc gives ENOENT.
REFUSED = (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOENT)

_libc = ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def hosts(n, rate=None):
    """n hosts, as `Hosts`. rate: bits per second of every link, or None for no limit."""
    made = Hosts()
    try:
        try:
            made.build(n, rate)
        except OSError as error:
            if error.errno not in REFUSED:
                raise
            pytest.skip(
                f"no network namespaces on this machine: {error}; run as root, on a kernel with veth and bridge"
            )
        yield made
    finally:
        made.close()


class Hosts:
    def __init__(self):
        self._spaces, self._switch, self._processes = [], None, []

    def build(self, n, rate):
        self._switch = _Space("switch")
        self._switch.link("bridge", kind="bridge", up=True)
        for i in range(n):
            space = _Space(f"host{i}")
            self._spaces.append(space)
            self._switch.link(f"port{i}", kind="veth", peer=("eth0", space.net), up=True, master="bridge")
            space.link("lo", up=True)
            space.link("eth0", up=True)
            space.address("eth0", self.address(i))
            if rate:
                space.shape("eth0", rate)
                self._switch.shape(f"port{i}", rate)

    def address(self, host):
        return f"10.83.0.{host + 1}"

    def prefix(self, host):
        """The command prefix that runs a command on this host."""
        space, own = self._spaces[host], f"/proc/{os.getpid()}/fd"
        return ["nsenter", f"--net={own}/{space.net}", f"--uts={own}/{space.uts}", "--"]

    def popen(self, host, argv, **options):
        """A process on this host. It is killed when the hosts are removed."""
        process = subprocess.Popen([*self.prefix(host), *argv], **options)
        self._processes.append(process)
        return process

    def inside(self, host, function, *arguments):
        """Calls the function on this host and returns its result. A socket created there stays on this host."""
        return self._spaces[host].inside(function, *arguments)

    def cut(self, host):
        """Pulls the host's plug: no traffic in or out, and no notification."""
        self._switch.link(f"port{host}", up=False)

    def mend(self, host):
        self._switch.link(f"port{host}", up=True)

    def close(self):
        for process in self._processes:
            process.kill()
            process.wait(10)
        for space in [*self._spaces, self._switch]:
            if space:
                space.close()


class _Space:
    """A network namespace and a host name, with a netlink socket into it."""

    def __init__(self, name):
        self.net = self.uts = self._netlink = None
        _in_a_thread(self._make, name)

    def _make(self, name):
        _call("unshare", NEW_NET | NEW_UTS)
        socket.sethostname(name)
        self.net, self.uts = (os.open(f"/proc/thread-self/ns/{kind}", os.O_RDONLY) for kind in ("net", "uts"))
        self._netlink = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)

    def inside(self, function, *arguments):
        def enter():
            _call("setns", self.net, NEW_NET)
            return function(*arguments)

        return _in_a_thread(enter)

    def link(self, name, kind=None, peer=None, up=None, master=None):
        """Creates a link of this kind (peer: name and namespace of a veth's other end), or changes one."""
        new = kind is not None
        attributes = _attribute(3, name)  # IFLA_IFNAME
        if new:
            info = _attribute(1, kind)  # IFLA_INFO_KIND
            if peer:
                other = struct.pack("=BxHiII", 0, 0, 0, 0, 0) + _attribute(3, peer[0]) + _attribute(28, peer[1])
                info += _attribute(2, _attribute(1, other))  # IFLA_INFO_DATA, VETH_INFO_PEER; 28: IFLA_NET_NS_FD
            attributes += _attribute(18, info)  # IFLA_LINKINFO
        if master:
            attributes += _attribute(10, self.index(master))  # IFLA_MASTER
        flags = (UP if up else 0, 0 if up is None else UP)
        index = 0 if new else self.index(name)
        self._ask(NEWLINK, new, struct.pack("=BxHiII", 0, 0, index, *flags) + attributes)

    def index(self, name):
        return self.inside(socket.if_nametoindex, name)

    def address(self, name, address):
        packed = socket.inet_aton(address)
        head = struct.pack("=BBBBi", socket.AF_INET, 24, 0, 0, self.index(name))
        self._ask(NEWADDR, True, head + _attribute(1, packed) + _attribute(2, packed))  # IFA_ADDRESS, IFA_LOCAL

    def shape(self, name, rate):
        """A token bucket: `rate` bits per second out of this link, bursts of 2 ms or 256 KiB, 50 ms of queue."""
        rate = int(rate / 8)
        burst = max(rate // 500, 4 << 16)
        spec = struct.pack("=BBHhHI", 0, ETHERNET, 0, 0, 0, min(rate, 2**32 - 1))
        options = _attribute(1, spec + bytes(12) + struct.pack("=III", rate // 20 + burst, 0, 0))  # TCA_TBF_PARMS
        options += _attribute(4, struct.pack("=Q", rate)) + _attribute(6, burst)  # TCA_TBF_RATE64, TCA_TBF_BURST
        head = struct.pack("=BxxxiIII", 0, self.index(name), 0, 0xFFFFFFFF, 0)  # 0xFFFFFFFF: TC_H_ROOT
        self._ask(NEWQDISC, True, head + _attribute(1, "tbf") + _attribute(2, options))  # TCA_KIND, TCA_OPTIONS

    def _ask(self, kind, new, body):
        flags = REQUEST | ACK | (CREATE | EXCLUSIVE if new else 0)
        self._netlink.send(struct.pack("=IHHII", 16 + len(body), kind, flags, 0, 0) + body)
        (error,) = struct.unpack_from("=i", self._netlink.recv(65536), 16)  # after the header of the NLMSG_ERROR
        if error:
            raise OSError(-error, f"rtnetlink request {kind}: {os.strerror(-error)}")

    def close(self):
        for fd in (self.net, self.uts):
            if fd is not None:
                os.close(fd)
        if self._netlink:
            self._netlink.close()


def _attribute(kind, value):
    if isinstance(value, str):
        value = value.encode() + b"\0"
    elif isinstance(value, int):
        value = struct.pack("=I", value)
    return struct.pack("=HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)


def _call(name, *arguments):
    if getattr(_libc, name)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def _in_a_thread(function, *arguments):
    """Namespaces belong to a thread. The function runs in a new thread, which is moved and ends with it."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *arguments).result()
