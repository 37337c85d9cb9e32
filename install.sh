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

# shellcheck source=script/install/look.sh
. "$ROOT/script/install/look.sh"
# shellcheck source=script/install/decide.sh
. "$ROOT/script/install/decide.sh"

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

# The environment's Python finds our packages too: after all others, and wherever the folder is moved.
add_shelves() {
    local site
    for site in "$VENV"/lib/python3*/site-packages; do
        printf '../../../../%s\n' models onnx build runtime >"$site/sa3.pth"
    done
}

install_packages() {
    local wanted=$MARK
    if [[ -f $STAMP && $(stamped mark) == "$wanted" && -x $VENV/bin/python && -z $(unmet) ]]; then
        add_shelves
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
    add_shelves
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

ask_models() {
    local kind=checkpoint number model answer
    [[ " $(published_architectures) " != *" ${TARGET:-none} "* ]] || kind=engine
    say ''
    say 'Which models? The demo is here already; the others ask you to accept their terms first.'
    number=0
    while IFS='|' read -r model answer; do
        number=$((number + 1))
        say "$(printf '  %d  %-8s  %4s GB   %s' "$number" "$model" "$(gigabytes "$kind" "$model")" "$answer")"
    done <<'EOF'
sm-music|music up to 2 minutes
sm-sfx|sound effects up to 2 minutes
medium|the best quality, up to 6 minutes
all|all of them
EOF
    say '  5  none'
    [[ $kind == engine ]] || say '  These are checkpoints; what is exported from them comes beside them.'
    while answer=$(ask 'Numbers, e.g. 1,2' 5); ! engines=$(chosen_models "$answer"); do
        say "  '$answer' is no choice: numbers from 1 to 5"
    done
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

# the interpreter itself: a version manager's stand-in takes a lock for each pip, which one that was
# killed leaves behind
[[ -z $PYTHON ]] || PYTHON=$("$PYTHON" -c 'import sys; print(sys.executable)')
MARK=$(pins | cksum)
install_packages 9>&-
if [[ $keep == yes && $CUDA == none && $GPU_COUNT -gt 0 && $quiet == no ]]; then
    say "  There is a GPU ($GPU_NAME): ./install.sh adds what it needs."
fi
get_engines
