#!/bin/bash
# Installs AMD's runtime compiler (hiprtc, comgr, the HIP runtime) into a folder of its own.
set -euo pipefail

usage() {
    cat <<USAGE
usage: get-hiprtc.sh DEST [SUITE]

Downloads Debian's packages of hiprtc with everything they need, the C library included, and unpacks them under
DEST (about 300 MB unpacked). Needs apt-get and dpkg, no root; the host's packages and apt state stay as they are.

  DEST    a folder to make or to refresh
  SUITE   the Debian suite to take them from (default: forky)

The archive is the one that the host's apt uses; MIRROR=URL names another.

Afterwards kernelseam finds hiprtc there by the variable KERNELSEAM_HIP=DEST:

  KERNELSEAM_HIP=DEST kernelseam compile gemm --arch gfx942

DEST/run starts a whole program under the new C library with ROCM_PATH set, which tests need:

  DEST/run python -m pytest

A child process started from sys.executable runs under the host's C library again; start it through \$KERNELSEAM_HIP_RUN,
which DEST/run sets to itself.
USAGE
}

case "${1:-}" in
    ""|-h|--help) usage; [ -n "${1:-}" ]; exit ;;
esac
mkdir -p "$1"
dest=$(cd "$1" && pwd)
suite=${2:-forky}
keyring=/usr/share/keyrings/debian-archive-keyring.gpg

mirror=${MIRROR:-}
if [ -z "$mirror" ]; then
    mirror=$(awk '/^URIs:/ { print $2; exit }' /etc/apt/sources.list.d/*.sources 2>/dev/null || true)
fi
if [ -z "$mirror" ]; then
    mirror=$(awk '/^deb / { for (i = 2; i <= NF; i++) if ($i ~ /^http/) { print $i; exit } }' /etc/apt/sources.list 2>/dev/null || true)
fi
if [ -z "$mirror" ] || [ ! -e "$keyring" ]; then
    echo "get-hiprtc.sh: needs a Debian archive (set MIRROR=URL) and $keyring (package debian-archive-keyring)" >&2
    exit 2
fi

# An apt of its own: nothing of the host's configuration, lists or status is read or written.
apt=$dest/apt
mkdir -p "$apt/lists/partial" "$apt/cache/archives/partial"
: > "$apt/status"
echo "deb [signed-by=$keyring] $mirror $suite main" > "$apt/sources.list"
cat > "$apt/apt.conf" <<CONF
Dir::Etc::sourcelist "$apt/sources.list";
Dir::Etc::sourceparts "/dev/null";
Dir::State "$apt";
Dir::State::lists "$apt/lists";
Dir::State::status "$apt/status";
Dir::Cache "$apt/cache";
APT::Architecture "amd64";
APT::Sandbox::User "root";
Acquire::Languages "none";
CONF
export APT_CONFIG=$apt/apt.conf
apt-get -qq update

# Package names carry the major version, which moves with the suite: take the newest of each kind.
newest() {
    local found
    found=$(apt-cache pkgnames "$1" | grep -E "^$1[0-9.-]+\$" | sort -V | tail -n 1 || true)
    if [ -z "$found" ]; then
        echo "get-hiprtc.sh: suite $suite has no package named $1*" >&2
        exit 1
    fi
    echo "$found"
}
hiprtc=$(newest libhiprtc)
builtins=$(newest libhiprtc-builtins)
runtime=$(newest libamdhip64-)
apt-get -qq -y --no-install-recommends --download-only install "$hiprtc" "$builtins" "$runtime" > "$apt/install.log"
# The bitcode libraries must be those of the LLVM that comgr was built with.
llvm=$(find "$apt/cache/archives" -name 'libllvm[0-9]*.deb' -printf '%f\n' | sed -E 's/^libllvm([0-9]+).*/\1/' | sort -V | tail -n 1)
apt-get -qq -y --no-install-recommends --download-only install "rocm-device-libs-$llvm" >> "$apt/install.log"
for package in "$apt"/cache/archives/*.deb; do
    dpkg -x "$package" "$dest"
done
rm -rf "$apt"

# hip-python looks for unversioned names in $ROCM_PATH/lib.
libraries=$dest/usr/lib/x86_64-linux-gnu
mkdir -p "$dest/rocm/lib"
for name in hiprtc hiprtc-builtins amdhip64 amd_comgr; do
    found=$(find "$libraries" -name "lib$name.so.[0-9]" -o -name "lib$name.so.[0-9][0-9]" | sort -V | tail -n 1)
    if [ -z "$found" ]; then
        echo "get-hiprtc.sh: the packages hold no lib$name" >&2
        exit 1
    fi
    ln -sfn "$found" "$dest/rocm/lib/lib$name.so"
done

cat > "$dest/run" <<RUN
#!/bin/sh
# usage: run PROGRAM [ARGUMENT…]: start PROGRAM (found on PATH) with hiprtc and the HIP runtime at hand.
program=\$(command -v "\$1") || { echo "run: \$1 not found" >&2; exit 127; }
shift
export ROCM_PATH="$dest/rocm" KERNELSEAM_HIP_RUN="$dest/run"
exec "$libraries/ld-linux-x86-64.so.2" --library-path "$libraries:$dest/rocm/lib" --argv0 "\$program" "\$program" "\$@"
RUN
chmod +x "$dest/run"
echo "$dest/run"
