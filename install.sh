#!/usr/bin/env bash
# From a bare machine to a working environment in .venv, and on request to engines.
#
# First it looks (driver, cards, Python, disk), then it decides, then it says what it will do, then it
# does it. Decisions depend on nothing but what was seen: --dry-run shows them and stops. Every step
# checks its result, so a second run is quick, and repairs what a stopped one left.
# Works without a terminal: then it asks nothing.
set -euo pipefail

usage() {
    cat <<'EOF'
usage: ./install.sh [options]

  --engines LIST   models to get ready: sm-music,sm-sfx,medium,all,none (asked for on a terminal)
  --arch ARCH      engines for this architecture (sm_86, 8.6) instead of this machine's
  --cpu            nothing of the GPU
  --keep           what is installed already, else the core; no decision about the GPU
  --dev            the tools of tests and linters too
  -y, --yes        no questions; builds engines where none are published
  --offline        no network: packages from SA3_WHEELS (a folder of wheels) or from uv's cache
  --dry-run        print every decision and its reason, change nothing
  -q, --quiet      nothing to do, nothing to say
  -h, --help       this text

environment: SA3_NVIDIA_INDEX (NVIDIA's package index or a mirror), SA3_WHEELS, SA3_HOME
exit codes: 0 done, 1 failed, 2 usage, 3 offline and something is missing
EOF
}

ROOT=$(CDPATH='' cd -- "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
VENV=$ROOT/.venv
STAMP=$VENV/.sa3 # written last: an environment without it is not complete
UV_VERSION=0.13.9
NVIDIA_INDEX=${SA3_NVIDIA_INDEX:-https://pypi.nvidia.com}
DRIVERS=https://www.nvidia.com/drivers

# ---------------------------------------------------------------------------------------- talk

quiet=no
say() { printf '%s\n' "$*" >&2; }
step() { printf '· %s\n' "$*" >&2; }
stop() { # stop CODE WHAT [HINT]
    say "install.sh: $2"
    [[ $# -lt 3 ]] || say "  → $3"
    exit "$1"
}
decide() { # decide TOPIC WHAT [WHY]: one line of the plan
    PLAN+="$(printf '%-9s %s%s' "$1" "$2" "${3:+ – $3}")"$'\n'
}
ask() { # ask QUESTION DEFAULT: the answer on stdout
    local answer
    printf '%s [%s] ' "$1" "$2" >&2
    read -r answer || answer=
    printf '%s' "${answer:-$2}"
}

# ---------------------------------------------------------------------------------- look around

look_system() {
    OS=$(uname -s)
    MACHINE=$(uname -m)
    WSL=no
    case $(uname -r) in *[Mm]icrosoft* | *WSL*) WSL=yes ;; esac
    CONTAINER=no
    if [[ -f /.dockerenv || -f /run/.containerenv || -n ${container:-} ]]; then CONTAINER=yes; fi
    MUSL=no
    if [[ $OS == Linux ]] && command -v ldd >/dev/null; then
        case $(ldd --version 2>&1 || true) in *musl*) MUSL=yes ;; esac
    fi
    FREE_MB=0
    local line
    line=$(df -Pk "$ROOT" 2>/dev/null | tail -n 1) || line=
    # shellcheck disable=SC2086 # words are wanted
    set -- $line
    [[ ${4:-} =~ ^[0-9]+$ ]] && FREE_MB=$(($4 / 1024))
    return 0
}

# Cards as lines "index, name, capability, driver, MiB, MIG"; SMI says how nvidia-smi answered.
look_gpu() {
    GPUS='' SMI=absent SMI_SAYS=''
    local smi=nvidia-smi
    if ! command -v "$smi" >/dev/null; then
        [[ -x /usr/lib/wsl/lib/nvidia-smi && $WSL == yes ]] || return 0
        smi=/usr/lib/wsl/lib/nvidia-smi
    fi
    local patience=()
    if command -v timeout >/dev/null; then patience=(timeout 30); fi
    local fields=index,name,compute_cap,driver_version,memory.total,mig.mode.current
    if SMI_SAYS=$(${patience[@]+"${patience[@]}"} "$smi" "--query-gpu=$fields" --format=csv,noheader,nounits 2>&1); then
        SMI=ok
    elif SMI_SAYS=$(${patience[@]+"${patience[@]}"} "$smi" --query-gpu=index,name,driver_version --format=csv,noheader,nounits 2>&1); then
        SMI=old # a driver from before these questions existed
        SMI_SAYS=$(while IFS=, read -r index name driver; do
            printf '%s,%s, N/A,%s, N/A, N/A\n' "$index" "$name" "$driver"
        done <<<"$SMI_SAYS")
    else
        SMI=failed
        return 0
    fi
    local line
    while IFS= read -r line; do
        [[ $line =~ ^[0-9]+, ]] && GPUS+=$line$'\n'
    done <<<"$SMI_SAYS"
    [[ -n $GPUS ]] || SMI=empty
}

# The best card: CUDA counts the fastest first, nvidia-smi by slot, so the highest capability wins.
choose_gpu() {
    GPU_NAME='' GPU_CC='' DRIVER='' GPU_COUNT=0 GPU_MIG=no GPU_OTHERS=''
    local index name cc driver mig best=-1 rank
    while IFS=, read -r index name cc driver _ mig; do
        [[ -n $index ]] || continue
        GPU_COUNT=$((GPU_COUNT + 1))
        name=$(trim "$name") cc=$(trim "$cc") driver=$(trim "$driver") mig=$(trim "$mig")
        rank=0
        if [[ $cc =~ ^[0-9]+\.[0-9]$ ]]; then rank=${cc/./}; else cc=''; fi
        if ((rank > best)); then
            best=$rank GPU_NAME=$name GPU_CC=$cc DRIVER=$driver
            [[ $mig == Enabled ]] && GPU_MIG=yes || GPU_MIG=no
        fi
        case "$GPU_OTHERS " in *" sm_${cc/./} "*) ;; *) GPU_OTHERS+=" sm_${cc/./}" ;; esac
    done <<<"$GPUS"
}

trim() {
    local text=$1
    text=${text#"${text%%[! ]*}"}
    printf '%s' "${text%"${text##*[! ]}"}"
}

version_of() { "$1" -c 'import sys; print(".".join(map(str, sys.version_info[:3])))' 2>/dev/null; }

look_python() {
    PYTHON='' PYTHON_VERSION='' PYTHONS_SEEN=''
    local name version
    for name in python3.12 python3.11 python3.13 python3 python; do
        command -v "$name" >/dev/null || continue
        version=$(version_of "$name") || continue
        PYTHONS_SEEN+="${PYTHONS_SEEN:+, }$version"
        case $version in
            3.11.* | 3.12.* | 3.13.*)
                PYTHON=$(command -v "$name") PYTHON_VERSION=$version
                break
                ;;
        esac
    done
    UV=''
    local place
    for place in uv "$HOME/.local/bin/uv" "$HOME/.cargo/bin/uv"; do
        if command -v "$place" >/dev/null; then
            UV=$(command -v "$place")
            break
        fi
    done
}

# -------------------------------------------------------------------------------------- decide

# Which sets of packages: CUDA (none, cu12, cu13), FLAVOUR (none, tensorrt, tensorrt-rtx), and why.
decide_gpu() {
    CUDA=none FLAVOUR=none WHY=''
    local cc=${ARCH:-$GPU_CC}
    if [[ $cpu == yes ]]; then
        WHY='--cpu'
        return
    fi
    if [[ $GPU_COUNT -eq 0 ]]; then
        case $SMI in
            absent)
                if [[ $WSL == yes ]]; then
                    WHY='WSL sees no GPU: install the NVIDIA driver on the Windows side (none inside WSL), then wsl --update'
                elif [[ $OS == Darwin ]]; then
                    WHY='a Mac: rendered on the CPU'
                elif [[ $CONTAINER == yes ]]; then
                    WHY='this container sees no GPU: if the machine has one, start it with --gpus all (NVIDIA Container Toolkit)'
                else
                    WHY='no nvidia-smi: no NVIDIA GPU, or no driver for it'
                fi
                ;;
            failed) WHY="nvidia-smi fails, the driver is not running: ${SMI_SAYS%%$'\n'*}" ;;
            *) WHY='nvidia-smi lists no card' ;;
        esac
        if [[ -n $ARCH && $MACHINE == x86_64 ]]; then
            case $ARCH in
                7.5 | 8.0 | 8.6 | 8.9 | 12.0 | 12.1)
                    FLAVOUR=tensorrt-rtx
                    WHY="$WHY; engines for sm_${ARCH/./} can be built ahead of time by TensorRT-RTX"
                    ;;
                *) WHY="$WHY; engines for sm_${ARCH/./} can be downloaded here, not built" ;;
            esac
        fi
        return
    fi
    if [[ ${CUDA_VISIBLE_DEVICES-unset} == '' || ${CUDA_VISIBLE_DEVICES-} == -1 ]]; then
        WHY='CUDA_VISIBLE_DEVICES hides every GPU'
        return
    fi
    if [[ $MACHINE != x86_64 ]]; then
        WHY="a GPU on $MACHINE: the pinned GPU packages exist for x86_64 only"
        return
    fi
    local driver=${DRIVER%%.*}
    if [[ ! $driver =~ ^[0-9]+$ ]]; then
        WHY="nvidia-smi does not tell the driver's version (${DRIVER:-nothing})"
        return
    fi
    if ((driver < 525)); then
        local side=''
        [[ $WSL == no ]] || side=' (on the Windows side)'
        WHY="driver $DRIVER is too old: 525 or newer is needed, 580 or newer is best: update it$side from $DRIVERS"
        return
    fi
    if [[ -z $cc ]]; then
        WHY='the compute capability is not known: give it with --arch, e.g. --arch sm_86'
        return
    fi
    local rank=${cc/./}
    if ((rank < 70)); then
        WHY="compute capability $cc is below 7.0: no current CUDA package runs on it"
        return
    fi
    if ((driver >= 580 && rank >= 75)); then CUDA=cu13; else CUDA=cu12; fi
    local published
    published=" $(published_architectures) "
    if [[ $published == *" sm_$rank "* ]]; then
        FLAVOUR=tensorrt
        WHY="driver $DRIVER; engines for sm_$rank are published, for TensorRT 10.15"
    elif ((rank < 75)); then
        WHY="compute capability $cc: TensorRT does not support it any more, ONNX Runtime does"
    elif [[ $CUDA == cu13 ]]; then
        case $cc in
            7.5 | 8.0 | 8.6 | 8.9 | 12.0 | 12.1)
                FLAVOUR=tensorrt-rtx
                WHY="driver $DRIVER; no engines are published for sm_$rank: TensorRT-RTX builds them here"
                ;;
            *)
                FLAVOUR=tensorrt
                WHY="driver $DRIVER; no engines are published for sm_$rank: TensorRT builds them here"
                ;;
        esac
    else
        FLAVOUR=tensorrt
        WHY="driver $DRIVER allows CUDA 12 (580 or newer: CUDA 13); TensorRT builds engines for sm_$rank here"
    fi
}

# Architectures with published engines, as the catalogue knew them.
published_architectures() {
    local line
    while IFS= read -r line; do
        if [[ $line == 'architectures = '* ]]; then
            line=${line#*[}
            line=${line%]*}
            line=${line//\"/}
            printf '%s' "${line//,/}"
            return
        fi
    done <"$ROOT/models/sa3_models/catalogue.toml"
}

# Room in MB that the sets take, with the downloads beside them.
room_for() {
    local need=1000
    [[ $CUDA == none ]] || need=$((need + 4500))
    case $FLAVOUR in
        tensorrt) need=$((need + 6000)) ;;
        tensorrt-rtx) need=$((need + 800)) ;;
    esac
    printf '%s' "$need"
}

decide_disk() {
    local need
    if [[ $FREE_MB -eq 0 ]]; then
        decide disk 'free space unknown' 'df gives no number'
        return
    fi
    need=$(room_for)
    if ((FREE_MB < need)) && [[ $FLAVOUR != none ]]; then
        decide disk "no $FLAVOUR" "$need MB needed with it, $FREE_MB MB free"
        FLAVOUR=none
        need=$(room_for)
    fi
    if ((FREE_MB < need)) && [[ $CUDA != none ]]; then
        decide disk 'nothing of the GPU' "$need MB needed with it, $FREE_MB MB free"
        CUDA=none
        need=$(room_for)
    fi
    if ((FREE_MB < need)) && [[ ! -f $STAMP ]]; then
        FAIL="the disk is too full: $need MB are needed, $FREE_MB MB are free in $ROOT"
    fi
    decide disk "$FREE_MB MB free, at most $need MB needed" 'downloads included'
}

decide_all() {
    PLAN='' FAIL=''
    local note="$OS $MACHINE"
    [[ $WSL == no ]] || note+=', WSL'
    [[ $CONTAINER == no ]] || note+=', container'
    decide system "$note"
    case $OS in
        Linux | Darwin) ;;
        MINGW* | MSYS* | CYGWIN*) FAIL='this is a Windows shell: install WSL (wsl --install) and run install.sh there' ;;
        *) FAIL="$OS is not supported: Linux (also in WSL) and macOS are" ;;
    esac
    [[ $MUSL == no ]] || FAIL='this system uses musl (Alpine): there is no ONNX Runtime for it; use a glibc system such as debian:stable-slim'
    case $OS-$MACHINE in
        Linux-x86_64 | Linux-aarch64 | Darwin-arm64) ;;
        Linux-* | Darwin-*) FAIL=${FAIL:-"there are no packages for $MACHINE processors on $OS"} ;;
    esac

    if [[ -n $PYTHON ]]; then
        decide python "$PYTHON_VERSION ($PYTHON)"
    elif [[ -n $UV && $offline == no ]]; then
        decide python '3.12, brought by uv' "3.11, 3.12 or 3.13 is needed, found: ${PYTHONS_SEEN:-none}"
    elif [[ ! -f $STAMP ]]; then
        FAIL=${FAIL:-"Python 3.11, 3.12 or 3.13 is needed, found: ${PYTHONS_SEEN:-none}; install one (e.g. apt install python3 python3-venv) or uv"}
    fi
    decide installer "${UV:-uv $UV_VERSION if it can be had, else venv and pip}"

    decide_gpu
    if [[ $keep == yes ]]; then
        local was=none
        [[ ! -f $STAMP ]] || was=$(stamped sets)
        CUDA=none FLAVOUR=none
        case $was in *cu12*) CUDA=cu12 ;; *cu13*) CUDA=cu13 ;; esac
        case $was in *tensorrt-rtx*) FLAVOUR=tensorrt-rtx ;; *tensorrt*) FLAVOUR=tensorrt ;; esac
        WHY='as it is installed'
        [[ $was != none ]] || WHY='--keep: the core; without it the GPU is looked at too'
    fi
    if [[ $GPU_COUNT -gt 0 ]]; then
        note="$GPU_NAME, compute capability ${GPU_CC:-unknown}, driver $DRIVER"
        [[ $GPU_MIG == no ]] || note+='; MIG is on: a process sees one slice and its memory'
        if ((GPU_COUNT > 1)); then
            note+="; $GPU_COUNT cards"
            # shellcheck disable=SC2086 # words are wanted
            set -- $GPU_OTHERS
            [[ $# -lt 2 ]] || note+=" of$GPU_OTHERS: engines belong to one architecture, get the others with --arch"
        fi
        decide gpu "$note"
    fi
    decide_disk
    SETS=core
    [[ $CUDA == none ]] || SETS+=" gpu-$CUDA"
    case $FLAVOUR in
        tensorrt) SETS+=" tensorrt-$CUDA" ;;
        tensorrt-rtx) SETS+=' tensorrt-rtx' ;;
    esac
    if [[ $dev == yes ]]; then
        # tests build real engines, which TensorRT-RTX does without a card
        [[ $OS-$MACHINE != Linux-x86_64 || $FLAVOUR != none ]] || SETS+=' tensorrt-rtx'
        SETS+=' dev'
    fi
    decide packages "$SETS" "$WHY"

    TARGET=${ARCH:-$GPU_CC}
    TARGET=${TARGET:+sm_${TARGET/./}}
    [[ $CUDA$FLAVOUR != nonenone || -n $ARCH ]] || TARGET=
    if [[ -z $engines ]]; then
        if [[ $interactive == yes ]]; then
            decide engines 'asked for below'
        else
            engines=none
            decide engines none 'nobody to ask; --engines sm-music,medium or all gets them'
        fi
    elif [[ $engines == none ]]; then
        decide engines none '--engines none'
    elif [[ -z $TARGET ]]; then
        decide engines none "no GPU to use: checkpoints of $engines are pulled and exported for the CPU"
    elif [[ " $(published_architectures) " == *" $TARGET "* ]]; then
        decide engines "$engines for $TARGET: download"
    elif [[ $CUDA$FLAVOUR == nonenone ]]; then
        decide engines "$engines for $TARGET: skip" 'none published, and no TensorRT here to build them'
    elif [[ $yes == yes ]]; then
        decide engines "$engines for $TARGET: build" 'none published, -y'
    elif [[ $interactive == yes ]]; then
        decide engines "$engines for $TARGET: asked for below" 'none published'
    else
        decide engines "$engines for $TARGET: skip" 'none published; unattended, they are built only with -y'
    fi
}

# ------------------------------------------------------------------------------------------ do

stamped() { # stamped KEY: that line of the stamp
    local key value
    while read -r key value; do
        [[ $key != "$1" ]] || printf '%s' "$value"
    done <"$STAMP"
}

requirement_files() {
    local set
    for set in $SETS; do
        if [[ $set == core ]]; then
            printf '%s\n' "$ROOT/requirements.txt"
        else
            printf '%s\n' "$ROOT/requirements/$set.txt"
        fi
    done
}

# All pins of the chosen sets in one list; onnxruntime-gpu takes the place of onnxruntime.
pins() {
    local line file
    while IFS= read -r file; do
        while IFS= read -r line; do
            case $line in
                '' | '#'*) ;;
                onnxruntime==*) [[ $CUDA != none ]] || printf '%s\n' "$line" ;;
                *) printf '%s\n' "$line" ;;
            esac
        done <"$file"
    done < <(requirement_files)
}

venv_python() { "$VENV/bin/python" "$@"; }

# Prints what is missing, of another version or damaged, one pin a line; installed files are counted.
unmet() {
    pins | venv_python -I -c '
import sys
from importlib.metadata import PackageNotFoundError, distribution

for pin in sys.stdin.read().split():
    name, version = pin.split("==")
    try:
        found = distribution(name)
        whole = found.version == version and all(file.locate().exists() for file in found.files or ())
    except PackageNotFoundError:
        whole = False
    if not whole:
        print(pin)
'
}

bring_uv() { # a uv for this run only, in a temporary folder: it would take 60 MB of .venv
    [[ -z $UV && $offline == no && -n $PYTHON ]] || return 0
    "$PYTHON" -m pip --version >/dev/null 2>&1 || return 0
    SCRATCH=$(mktemp -d)
    if "$PYTHON" -m pip install --quiet --no-input --no-deps --target "$SCRATCH" "uv==$UV_VERSION" >/dev/null 2>&1; then
        UV=$SCRATCH/bin/uv
        "$UV" --version >/dev/null 2>&1 || UV=''
    fi
}

make_venv() {
    if [[ -x $VENV/bin/python ]]; then
        case $(version_of "$VENV/bin/python") in 3.11.* | 3.12.* | 3.13.*) return ;; esac
    fi
    rm -rf "$VENV"
    [[ -n $PYTHON || -n $UV ]] || stop 1 "Python 3.11, 3.12 or 3.13 is needed, found: ${PYTHONS_SEEN:-none}"
    if [[ -n $UV ]] && "$UV" venv --quiet --python "${PYTHON:-3.12}" "$VENV"; then return; fi
    [[ -n $PYTHON ]] || stop 1 'uv could not bring a Python' 'install Python 3.12 and run this again'
    if ! "$PYTHON" -m venv "$VENV" >&2; then
        rm -rf "$VENV"
        stop 1 "$PYTHON cannot make an environment" 'Debian and Ubuntu: apt install python3-venv; or install uv'
    fi
}

venv_has_pip() { # an environment that uv made has none
    venv_python -m pip --version >/dev/null 2>&1 || venv_python -m ensurepip >/dev/null 2>&1
}

# get_packages FILE: the pins in FILE, by uv, else by pip.
get_packages() {
    local extra=() from=()
    if [[ $SETS == *tensorrt-cu* ]]; then extra=(--extra-index-url "$NVIDIA_INDEX"); fi
    [[ -z ${SA3_WHEELS:-} ]] || from=(--find-links "$SA3_WHEELS")
    if [[ $offline == yes && ${#from[@]} -gt 0 ]]; then from+=(--no-index); fi
    if [[ -n $UV ]]; then
        local how=(pip install --python "$VENV/bin/python" --reinstall --no-deps)
        [[ -t 2 && $quiet == no ]] || how+=(--quiet)
        if [[ $offline == yes ]]; then how+=(--offline); fi
        if "$UV" "${how[@]}" ${extra[@]+"${extra[@]}"} ${from[@]+"${from[@]}"} -r "$1" >&2; then return 0; fi
        [[ $offline == no || ${#from[@]} -gt 0 ]] || return 1
        say '  uv could not get the packages: trying pip'
    fi
    [[ $offline == no || ${#from[@]} -gt 0 ]] || return 1
    venv_has_pip || return 1
    local how=(-m pip install --no-input --disable-pip-version-check --force-reinstall --no-deps)
    [[ -t 2 && $quiet == no ]] || how+=(--quiet)
    venv_python "${how[@]}" ${extra[@]+"${extra[@]}"} ${from[@]+"${from[@]}"} -r "$1" >&2
}

# TensorRT's libraries come from NVIDIA's index alone: ask before anything is downloaded.
check_nvidia_index() {
    [[ $SETS == *tensorrt-cu* ]] || return 0
    grep -q '^tensorrt' "$1" || return 0
    local why
    if ! why=$(venv_python -I -c '
import sys, urllib.request
try:
    urllib.request.urlopen(sys.argv[1].rstrip("/") + "/tensorrt-" + sys.argv[2] + "-libs/", timeout=20).close()
except Exception as error:
    sys.exit(str(getattr(error, "reason", error)))
' "$NVIDIA_INDEX" "$CUDA" 2>&1); then
        stop 1 "NVIDIA's package index $NVIDIA_INDEX cannot be reached: ${why##*$'\n'}" \
            'TensorRT comes from there only. Check the network or proxy (HTTPS_PROXY), name a mirror with SA3_NVIDIA_INDEX, or use the CPU: ./install.sh --cpu'
    fi
}

install_packages() {
    local wanted=$MARK
    if [[ -f $STAMP && $(stamped mark) == "$wanted" && -x $VENV/bin/python && -z $(unmet) ]]; then
        touch "$STAMP"
        [[ $quiet == yes ]] || step "packages: complete"
        return
    fi
    quiet=no
    rm -f "$STAMP"
    step "setting up .venv: $SETS"
    [[ -n $SCRATCH || -n $UV ]] || bring_uv
    make_venv
    local list
    list=$(mktemp)
    unmet >"$list"
    local count
    count=$(grep -c . "$list" || true)
    if ((count > 0)); then
        check_nvidia_index "$list"
        drop_other_runtime
        step "installing $count packages"
        if ! get_packages "$list"; then
            if [[ $offline == yes ]]; then
                stop 3 "offline, and these packages are missing: $(tr '\n' ' ' <"$list")" \
                    'on a connected machine: pip download -r requirements.txt -d wheels; bring the folder here and set SA3_WHEELS'
            fi
            stop 1 'the packages could not be installed (see above)' 'run ./install.sh again: it goes on where it stopped'
        fi
        unmet >"$list"
        [[ ! -s $list ]] || stop 1 "after installing, these are still not right: $(tr '\n' ' ' <"$list")" 'rm -rf .venv, then ./install.sh'
    fi
    rm -f "$list"
    printf 'mark %s\nsets %s\n' "$wanted" "$SETS" >"$STAMP.part"
    mv "$STAMP.part" "$STAMP"
    step "ready in ${SECONDS} s, $(du -sm "$VENV" | cut -f1) MB in .venv"
}

# onnxruntime and onnxruntime-gpu share a folder: only one of them may be there.
drop_other_runtime() {
    local other=onnxruntime-gpu
    [[ $CUDA == none ]] || other=onnxruntime
    venv_python -I -c 'import sys; from importlib.metadata import version; version(sys.argv[1])' "$other" 2>/dev/null || return 0
    if [[ -n $UV ]]; then
        "$UV" pip uninstall --quiet --python "$VENV/bin/python" "$other" >&2
    elif venv_has_pip; then
        venv_python -m pip uninstall --quiet --yes "$other" >&2
    fi
    # what they shared is gone with it: the one that stays is installed anew
    pins | grep '^onnxruntime' >>"$list" || true
    sort -u -o "$list" "$list"
}

sa3() { "$ROOT/sa3" "$@"; }

build_model() { # checkpoint, exports, engines of one architecture
    sa3 pull "$1" --checkpoint && sa3 export "$1" && sa3 build "$1" --arch "$TARGET"
}

models_of() {
    case $1 in
        all) printf 'sm-music sm-sfx medium' ;;
        none | '') ;;
        *) printf '%s' "${1//,/ }" ;;
    esac
}

ask_models() {
    say ''
    say 'Which models? The demo is here already; the others ask you to accept their terms first.'
    say '  1  sm-music   1.7 GB   music up to 2 minutes'
    say '  2  sm-sfx     1.7 GB   sound effects up to 2 minutes'
    say '  3  medium     6.6 GB   the best quality, up to 6 minutes'
    say '  4  all        9 GB'
    say '  5  none'
    local answer
    answer=$(ask 'Numbers, separated by commas' 5)
    answer=${answer//[[:space:]]/}
    answer=${answer//1/sm-music}
    answer=${answer//2/sm-sfx}
    answer=${answer//3/medium}
    case $answer in *4*) answer=all ;; *5*) answer=none ;; esac
    engines=$answer
}

get_engines() {
    if [[ -z $engines ]]; then ask_models; fi
    local names model
    names=$(models_of "$engines")
    [[ -n $names ]] || return 0
    if [[ -z $TARGET ]]; then
        for model in $names; do
            sa3 pull "$model" --checkpoint
            sa3 export "$model"
        done
        return
    fi
    local published
    published=$(sa3 list --architectures) || published=$(published_architectures)
    published=" ${published//$'\n'/ } "
    local action=download
    if [[ $published != *" $TARGET "* ]]; then
        action=skip
        if [[ $yes == yes && $CUDA$FLAVOUR != nonenone ]]; then
            action=build
        elif [[ $interactive == yes ]]; then
            say "No engines are published for $TARGET (there are:$published)."
            say '  [B]uild them from the checkpoint: 10 to 40 minutes, 4 GB of memory, 12 GB of disk for a small model'
            say '  [D]ownload those of another architecture: they will not load on this card'
            say '  [S]kip: the model runs through ONNX Runtime'
            case $(ask 'B, D or S' S) in
                [Bb]*) action=build ;;
                [Dd]*)
                    action=download
                    TARGET=$(ask "Which of$published" sm_90)
                    ;;
            esac
        fi
    fi
    step "engines for $TARGET: $action"
    for model in $names; do
        case $action in
            download) sa3 pull "$model" --engines --arch "$TARGET" ;;
            build) build_model "$model" ;;
            skip) say "  $model: none published for $TARGET; build them with ./install.sh -y --engines $model" ;;
        esac
    done
}

# --------------------------------------------------------------------------------------- begin

cpu=no keep=no dev=no yes=no offline=no dry=no engines='' ARCH='' SCRATCH=''
while [[ $# -gt 0 ]]; do
    case $1 in
        --engines=* | --arch=*)
            set -- "${1%%=*}" "${1#*=}" "${@:2}"
            continue
            ;;
        --engines)
            [[ -n ${2:-} ]] || stop 2 '--engines needs a list' 'e.g. --engines sm-music,medium'
            engines=$2
            shift
            ;;
        --arch)
            ARCH=${2:-}
            ARCH=${ARCH#sm}
            ARCH=${ARCH#_}
            [[ $ARCH == *.* || ${#ARCH} -lt 2 ]] || ARCH=${ARCH%?}.${ARCH: -1}
            [[ $ARCH =~ ^[0-9]+\.[0-9]$ ]] || stop 2 "--arch ${2:-} is no architecture" 'e.g. --arch sm_86'
            shift
            ;;
        --cpu) cpu=yes ;;
        --keep) keep=yes ;;
        --dev) dev=yes ;;
        -y | --yes) yes=yes ;;
        --offline) offline=yes ;;
        --dry-run) dry=yes ;;
        -q | --quiet) quiet=yes ;;
        -h | --help)
            usage
            exit 0
            ;;
        *) stop 2 "unknown option $1" './install.sh --help lists them' ;;
    esac
    shift
done
for model in $(models_of "$engines"); do
    case $model in
        sm-music | sm-sfx | medium | small-music | small-sfx) ;;
        *) stop 2 "--engines does not know '$model'" 'sm-music, sm-sfx, medium, all or none' ;;
    esac
done
interactive=no
if [[ $yes == no && $keep == no && $dev == no && $dry == no && -t 0 && -t 2 ]]; then interactive=yes; fi
if [[ -f $STAMP && $(stamped sets) == *dev* ]]; then dev=yes; fi # tools once there stay there

trap '[[ -z $SCRATCH ]] || rm -rf "$SCRATCH"' EXIT
trap 'say "install.sh: interrupted; run it again, it goes on where it stopped"; exit 130' INT TERM

look_system
look_gpu
choose_gpu
look_python
decide_all

if [[ $dry == yes ]]; then
    printf '%s' "$PLAN"
    [[ -z $FAIL ]] || stop 1 "$FAIL"
    exit 0
fi
[[ $quiet == yes || $keep == yes ]] || say "$PLAN"
[[ -z $FAIL ]] || stop 1 "$FAIL"

# one at a time: a second one waits and then finds everything done
mkdir -p "$ROOT/models"
if command -v flock >/dev/null; then
    exec 9>"$ROOT/models/.install.lock"
    flock -n 9 || {
        step 'another install.sh is at work: waiting for it'
        flock 9
    }
fi

MARK=$(pins | cksum)
install_packages 9>&-
if [[ $keep == yes && $CUDA == none && $GPU_COUNT -gt 0 && $quiet == no ]]; then
    say "  There is a GPU ($GPU_NAME): ./install.sh adds what it needs."
fi
get_engines
