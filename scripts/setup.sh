#!/usr/bin/env bash
# Makes this machine and this tree ready: Debian packages, .venv, Python packages, bpffs.
#
#   scripts/setup.sh          all of it; `make setup`, `make demo` and `make test` call it when needed
#   scripts/setup.sh bpffs    only mounts /sys/fs/bpf if it is not mounted (a reboot undoes that)
#
# What is there already is left alone, so a second run needs neither network nor root.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly LOG=.setup.log
readonly STEPS=5
# bcc is the distribution's; libbpf is called by the agent; linux-libc-dev holds the headers that the
# BPF programs include; nft or iptables writes its rules in netfilter (the tests need both). The rest
# is for the lab, the tests and the benchmarks (C clients).
PACKAGES=(
	python3-bpfcc libbpf1 python3-venv linux-libc-dev nftables iptables
	iproute2 util-linux gcc libc6-dev make openssl
)
step=0

say() { printf '%s\n' "$*"; }

begin() {
	step=$((step + 1))
	printf '[%d/%d] %s\n' "$step" "$STEPS" "$*"
}

die() {
	printf 'setup: %s\n' "$*" >&2
	exit 1
}

# quiet COMMAND…: runs it with its output in the log; says so every 15 s; shows the end of the log
# when it fails.
quiet() {
	local began=$SECONDS pid next=15
	printf '\n$ %s\n' "$*" >>"$LOG"
	"$@" >>"$LOG" 2>&1 </dev/null &
	pid=$!
	trap 'kill "$pid" 2>/dev/null; exit 130' INT TERM # the shell shields background jobs from Ctrl-C
	while kill -0 "$pid" 2>/dev/null; do
		sleep 0.2
		if ((SECONDS - began >= next)); then
			say "      … $((SECONDS - began)) s: $(tail -n 1 "$LOG" | tr -d '\r' | cut -c 1-80)"
			next=$((next + 15))
		fi
	done
	if ! wait "$pid"; then
		printf '\nsetup: this failed: %s\nThe end of %s:\n' "$*" "$LOG" >&2
		tail -n 25 "$LOG" | sed 's/^/  | /' >&2
		exit 1
	fi
	trap - INT TERM
}

# as_root WHY: sets SUDO to what a command that needs root begins with, or ends with WHY.
as_root() {
	SUDO=()
	if ((EUID != 0)); then
		command -v sudo >/dev/null || die "$1 needs root and there is no sudo: run this as root"
		say "      $1 needs root: asking sudo"
		sudo -v || die "sudo refused; $1 needs root"
		SUDO=(sudo)
	fi
}

check_machine() {
	local id=unknown version='' name='an unknown system'
	if [[ -r /etc/os-release ]]; then
		# shellcheck source=/dev/null
		read -r id version name < <(. /etc/os-release && echo "${ID:-unknown}" "${VERSION_ID:--}" "${PRETTY_NAME:-}")
	fi
	begin "machine: $name, Linux $(uname -r), $(uname -m)"
	case $id:$version in
	debian:12) PACKAGES+=(bpftool) ;;
	ubuntu:24.04) PACKAGES+=(linux-tools-common) ;; # bpftool is in there
	*)
		say "      not one of the tested systems (Debian 12, Ubuntu 24.04); trying their package names"
		;;
	esac
}

install_packages() {
	local package missing=()
	type dpkg-query apt-get &>/dev/null ||
		die "this script knows apt alone. Install by hand what gives: bcc for Python 3.11 or newer," \
			"libbpf 1, venv, ip, nsenter, gcc, the kernel's UAPI headers; then see this script for the rest"
	for package in "${PACKAGES[@]}"; do
		[[ $(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null) == installed ]] ||
			missing+=("$package")
	done
	if ((${#missing[@]} == 0)); then
		begin "system packages: all there"
		return
	fi
	begin "system packages: ${missing[*]}"
	as_root "apt-get install ${missing[*]}"
	quiet "${SUDO[@]}" apt-get -q -o DPkg::Lock::Timeout=120 update
	quiet "${SUDO[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q -y --no-install-recommends \
		-o DPkg::Lock::Timeout=120 install "${missing[@]}"
}

# The venv must be of /usr/bin/python3 and see the system's packages: python3-bpfcc is one of them.
venv_is_good() {
	grep -qsx 'include-system-site-packages = true' .venv/pyvenv.cfg &&
		.venv/bin/python -c '
import os, sys
here = os.path.realpath(sys.prefix) == os.path.realpath(".venv")
sys.exit(not (here and os.path.realpath(sys.base_prefix) == "/usr"))' 2>/dev/null &&
		.venv/bin/python -m pip --version &>/dev/null
}

make_venv() {
	if [[ -e .venv && ! -w .venv ]]; then
		die ".venv belongs to someone else (made with sudo?): remove it, or run make as its owner"
	fi
	if venv_is_good; then
		begin "Python environment: .venv is there ($(.venv/bin/python --version))"
		return
	fi
	begin "Python environment: .venv, $(/usr/bin/python3 --version) with the system's packages visible"
	/usr/bin/python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
		die "/usr/bin/python3 is $(/usr/bin/python3 --version); 3.11 or newer is needed"
	quiet /usr/bin/python3 -m venv --clear --system-site-packages .venv
}

install_python_packages() {
	local pip=(.venv/bin/python -m pip --disable-pip-version-check --no-input install -c constraints.txt)
	begin "Python packages: $(grep -c == constraints.txt) pinned in constraints.txt, and ebpflb itself"
	quiet "${pip[@]}" setuptools
	quiet "${pip[@]}" --no-build-isolation --editable '.[dev]'
	.venv/bin/python -c 'import bcc' 2>>"$LOG" ||
		die "the venv cannot import bcc (see the end of $LOG): is python3-bpfcc for $(/usr/bin/python3 --version)?"
}

bpffs_is_mounted() { [[ $(stat -f -c %T /sys/fs/bpf 2>/dev/null) == bpf_fs ]]; }

# mount_bpffs: prints nothing when there is nothing to do.
mount_bpffs() {
	bpffs_is_mounted && return
	as_root "mounting /sys/fs/bpf"
	if "${SUDO[@]}" mount -t bpf bpf /sys/fs/bpf 2>>"$LOG"; then
		say "      mounted bpffs at /sys/fs/bpf: what is pinned there outlives the agent"
	else
		say "      could not mount bpffs at /sys/fs/bpf (a container without the right?):" \
			"the demo and the kernel tests will fail"
	fi
}

if [[ ${1:-} == bpffs ]]; then
	mount_bpffs
	exit
fi

[[ ! -e $LOG || -w $LOG ]] || die "$LOG belongs to someone else: remove it"
: >"$LOG"
check_machine
install_packages
make_venv
install_python_packages
if bpffs_is_mounted; then
	begin "bpffs: mounted at /sys/fs/bpf"
else
	begin "bpffs: not mounted"
	mount_bpffs
fi
say "ready: .venv/bin/ebpflb (the log is $LOG)"
