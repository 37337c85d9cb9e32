# shellcheck shell=bash
# From what look.sh saw to what install.sh will do, with the reasons. Changes nothing.
# Part of install.sh, which sources it.

# Which sets of packages: CUDA (none, cu12, cu13), FLAVOUR (none, tensorrt, tensorrt-rtx), and why;
# RENDERS: whether the driver is new enough to render on the card.
decide_gpu() {
    CUDA=none FLAVOUR=none WHY='' RENDERS=yes
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
            hidden) WHY="CUDA_VISIBLE_DEVICES='$CUDA_VISIBLE_DEVICES' hides every GPU" ;;
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
        WHY="driver $DRIVER is too old for the GPU, clips are rendered on the CPU; 580 or newer brings it: update it$side from $DRIVERS"
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
    if ((driver < 580)); then
        RENDERS=no
        ((rank < 75)) || FLAVOUR=tensorrt
        WHY="driver $DRIVER allows CUDA 12, clips are rendered on the CPU with it; 580 or newer (CUDA 13) brings the GPU: update it from $DRIVERS; --cpu leaves all of this out"
        return
    fi
    local published
    published=" $(published_architectures) "
    if [[ $published == *" sm_$rank "* ]]; then
        FLAVOUR=tensorrt
        WHY="driver $DRIVER; engines for sm_$rank are published, for TensorRT 10.15"
    elif ((rank < 75)); then
        WHY="compute capability $cc: TensorRT does not support it any more, ONNX Runtime does"
    else
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

models_of() { # models_of LIST: their names
    case $1 in
        all) printf 'sm-music sm-sfx medium' ;;
        none | '') ;;
        *) printf '%s' "${1//,/ }" ;;
    esac
}

# chosen_models ANSWER: what the answer to the menu means for --engines; fails if it means nothing.
chosen_models() {
    local words word list=''
    read -r -a words <<<"${1//,/ }"
    for word in ${words[@]+"${words[@]}"}; do
        case $word in
            1 | sm-music) list+=,sm-music ;;
            2 | sm-sfx) list+=,sm-sfx ;;
            3 | medium) list+=,medium ;;
            4 | all) list+=,sm-music,sm-sfx,medium ;;
            5 | none) ((${#words[@]} == 1)) || return 1; list=,none ;;
            *) return 1 ;;
        esac
    done
    [[ -n $list ]] || return 1
    printf '%s' "${list#,}"
}

# gigabytes KIND LIST: download of the models, as the catalogue has it; KIND: checkpoint, engine.
gigabytes() {
    local line model='' sum=0 bytes names
    names=" $(models_of "$2") "
    names=${names//' sm-'/' small-'}
    while IFS= read -r line; do
        case $line in
            '[models.'*) model=${line#'[models.'} model=${model%']'} ;;
            "$1_bytes = "*)
                bytes=${line#*= }
                [[ $names != *" $model "* ]] || sum=$((sum + ${bytes//_/} / 1000000))
                ;;
        esac
    done <"$ROOT/models/sa3_models/catalogue.toml"
    sum=$(((sum + 50) / 100))
    printf '%d.%d' $((sum / 10)) $((sum % 10))
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
    decide disk "$FREE_MB MB free, at most $need MB needed for packages" 'downloads included'
}

# Sets of the GPU that are in .venv and not among the chosen ones: nothing removes them.
left_installed() {
    local set mark left=''
    for set in gpu-cu12 gpu-cu13 tensorrt-cu12 tensorrt-cu13 tensorrt-rtx; do
        case $set in
            gpu-*) mark=nvidia_cudnn_${set#gpu-} ;;
            tensorrt-rtx) mark=tensorrt_rtx_cu13_bindings ;;
            *) mark=${set//-/_} ;;
        esac
        [[ " $SETS " != *" $set "* ]] || continue
        compgen -G "$VENV/lib/python3*/site-packages/$mark-*.dist-info" >/dev/null || continue
        left+="${left:+ }$set"
    done
    printf '%s' "$left"
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
    local left
    left=$(left_installed)
    [[ -z $left ]] || decide kept "$left" 'installed before; rm -rf .venv, then ./install.sh, takes it away'

    TARGET=${ARCH:-$GPU_CC}
    TARGET=${TARGET:+sm_${TARGET/./}}
    [[ $CUDA$FLAVOUR != nonenone && $RENDERS == yes || -n $ARCH ]] || TARGET= # rendered on the CPU
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
        decide engines none "no GPU to use: checkpoints of $engines ($(gigabytes checkpoint "$engines") GB, exports beside them) are pulled and exported for the CPU"
    elif [[ " $(published_architectures) " == *" $TARGET "* ]]; then
        decide engines "$engines for $TARGET: download" "$(gigabytes engine "$engines") GB"
    elif [[ $CUDA$FLAVOUR == nonenone ]]; then
        decide engines "$engines for $TARGET: skip" 'none published, and no TensorRT here to build them'
    elif [[ $yes == yes ]]; then
        decide engines "$engines for $TARGET: build" "none published, -y; checkpoints of $(gigabytes checkpoint "$engines") GB, exports beside them"
    elif [[ $interactive == yes ]]; then
        decide engines "$engines for $TARGET: asked for below" 'none published'
    else
        decide engines "$engines for $TARGET: skip" 'none published; unattended, they are built only with -y'
    fi
}
