"""Runs a command on a machine with two NFS mounts of one server, where the kernel at hand has no NFS.

    python tools/nfs_guest.py fetch DIR             unpacks the Debian packages that this needs into DIR
    python tools/nfs_guest.py run DIR -- COMMAND    runs COMMAND in a guest

The guest is Linux as an ordinary process (User Mode Linux), on the files of this machine. It has the kernel's own NFS
server, version 4.2, and two clients in network namespaces of their own, so that neither shares a cache with the other.
COMMAND finds their mounts in KVOFFLOAD_NFS_A and KVOFFLOAD_NFS_B. They are empty at first and in the guest's memory.
"""

from __future__ import annotations

import argparse
import glob
import os
import shlex
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

PACKAGES = (
    *("user-mode-linux", "nfs-kernel-server", "nfs-common", "kmod", "iproute2"),
    *("libkmod2", "libnfsidmap1", "libwrap0", "libtirpc3", "libevent-core-2.1-7", "libbpf1", "libelf1", "libmnl0"),
    *("libcap2", "libdevmapper1.02.1", "libkeyutils1", "libxtables12", "libbsd0", "libmd0"),
)
MEMORY = "2G"
DISK_BYTES = 2 << 30
"""Size of the file system that the server exports: ext4, which counts changes. Where a server takes the time for that
count, as with tmpfs, clients never see the second of two changes within a tick of 4 to 10 ms."""
TIMEOUT_S = 300

INIT = r"""#!/bin/sh
export PATH=$R/kbin:$R/bin:$R/sbin:$R/usr/sbin:/usr/sbin:/usr/bin:/sbin:/bin
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t tmpfs tmp /run
mkdir -p /run/var/nfs/v4recovery /run/var/nfs/rpc_pipefs /run/modules/lib /run/srv /run/a /run/b /run/netns
cp -a /etc /run/etc; mount --bind /run/etc /etc; mount --bind /run/var /var/lib
touch /etc/exports /var/lib/nfs/etab /var/lib/nfs/rmtab
ln -s $R/usr/lib/uml/modules /run/modules/lib/modules
export LD_LIBRARY_PATH=$R/usr/lib/x86_64-linux-gnu:$R/lib/x86_64-linux-gnu
for module in nfsd nfsv4 veth; do modprobe -d /run/modules $module; done
ip link set lo up
mount -t nfsd nfsd /proc/fs/nfsd; mount -t rpc_pipefs pipes /var/lib/nfs/rpc_pipefs
echo 10 > /proc/fs/nfsd/nfsv4leasetime; echo 10 > /proc/fs/nfsd/nfsv4gracetime
mount -o iversion /dev/ubda /run/srv || mount -t ext4 -o iversion /dev/ubda /run/srv
exportfs -o rw,no_root_squash,insecure,no_subtree_check,fsid=0 "*:/run/srv"
rpc.nfsd -N 3 -V 4.2 4
rpc.mountd -N 3 -F 2>/dev/null &
sleep 1
echo Y > /proc/fs/nfsd/v4_end_grace
net=1
for name in a b; do
    ip netns add $name
    ip link add v$name type veth peer name e$name netns $name
    ip addr add 10.0.$net.1/24 dev v$name; ip link set v$name up
    ip -n $name addr add 10.0.$net.2/24 dev e$name; ip -n $name link set e$name up
    ip netns exec $name sh -c "echo client-$name > /sys/fs/nfs/net/nfs_client/identifier"
    nsenter --net=/run/netns/$name mount -i -t nfs4 \
        -o vers=4.2,$OPTIONS,addr=10.0.$net.1,clientaddr=10.0.$net.2 10.0.$net.1:/ /run/$name
    net=$((net + 1))
done
unset LD_LIBRARY_PATH
cd "$FOLDER"
export KVOFFLOAD_NFS_A=/run/a KVOFFLOAD_NFS_B=/run/b
sh -c "$COMMAND"
echo $? > $RESULT
echo o > /proc/sysrq-trigger; sleep 60
"""


def fetch(root: Path) -> int:
    """Downloads the packages and unpacks them into ``root``."""
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        subprocess.run(["apt-get", "download", "-qq", *PACKAGES], cwd=folder, check=True, stderr=subprocess.DEVNULL)
        for package in glob.glob(f"{folder}/*.deb"):
            subprocess.run(["dpkg", "-x", package, root], check=True)
    (root / "kbin").mkdir(exist_ok=True)
    (root / "kbin/modprobe").unlink(missing_ok=True)
    (root / "kbin/modprobe").symlink_to("../bin/kmod")
    return 0


def run(root: Path, command: str, options: str = "hard,actimeo=3") -> int:
    """Runs ``command`` in a guest, with the mount options ``options``. Returns its exit status, 1 if the guest ended
    before it."""
    root = root.resolve()
    with tempfile.TemporaryDirectory() as folder:
        init, result = Path(folder, "init"), Path(folder, "result")
        settings = {
            "R": str(root),
            "OPTIONS": options,
            "FOLDER": os.getcwd(),
            "COMMAND": command,
            "RESULT": str(result),
            "HOME": folder,
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        }
        exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in settings.items())
        init.write_text(INIT.replace("#!/bin/sh\n", f"#!/bin/sh\n{exports}", 1))
        init.chmod(0o755)
        disk = Path(folder, "disk")
        with disk.open("wb") as file:
            file.truncate(DISK_BYTES)
        subprocess.run(["mkfs.ext4", "-q", disk], check=True)
        kernel = [str(root / "usr/bin/linux.uml"), f"mem={MEMORY}", "rootfstype=hostfs", "rootflags=/", "rw"]
        kernel += [f"init={init}", "con=null", "con0=null,fd:1", "quiet", f"uml_dir={folder}", f"ubd0={disk}"]
        guest = subprocess.Popen(kernel, stdin=subprocess.DEVNULL, start_new_session=True)
        try:
            guest.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            print(f"the guest has not ended within {TIMEOUT_S} s", file=sys.stderr)
        finally:
            # Its processes have a session of their own.
            with suppress(ProcessLookupError):
                os.killpg(guest.pid, 9)
            guest.wait()
        return int(result.read_text()) if result.exists() else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="action", required=True)
    commands.add_parser("fetch").add_argument("root", type=Path)
    command = commands.add_parser("run")
    command.add_argument("root", type=Path)
    command.add_argument("command", nargs="+")
    options = parser.parse_args()
    return fetch(options.root) if options.action == "fetch" else run(options.root, shlex.join(options.command))


if __name__ == "__main__":
    sys.exit(main())
