# shellcheck shell=bash
# What this machine is: system, disk, cards and driver, Python, uv. Sets variables, changes nothing.
# Part of install.sh, which sources it.

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

# Cards as lines "index, name, capability, driver, MiB, MIG, UUID"; SMI says how nvidia-smi answered:
# absent, failed, empty (no card), hidden (no card that a program may use), old, ok.
look_gpu() {
    GPUS='' SMI=absent SMI_SAYS=''
    local smi=nvidia-smi
    if ! command -v "$smi" >/dev/null; then
        [[ -x /usr/lib/wsl/lib/nvidia-smi && $WSL == yes ]] || return 0
        smi=/usr/lib/wsl/lib/nvidia-smi
    fi
    local patience=()
    if command -v timeout >/dev/null; then patience=(timeout 30); fi
    local fields=index,name,compute_cap,driver_version,memory.total,mig.mode.current,uuid
    if SMI_SAYS=$(${patience[@]+"${patience[@]}"} "$smi" "--query-gpu=$fields" --format=csv,noheader,nounits 2>&1); then
        SMI=ok
    elif SMI_SAYS=$(${patience[@]+"${patience[@]}"} "$smi" --query-gpu=index,name,driver_version,uuid --format=csv,noheader,nounits 2>&1); then
        SMI=old # a driver from before these questions existed
        SMI_SAYS=$(while IFS=, read -r index name driver uuid; do
            printf '%s,%s, N/A,%s, N/A, N/A,%s\n' "$index" "$name" "$driver" "$uuid"
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
    [[ ${CUDA_DEVICE_ORDER-} == PCI_BUS_ID ]] || GPUS=$(LC_ALL=C sort -s -t, -k3,3nr <<<"$GPUS")
    if [[ -n $GPUS && -n ${CUDA_VISIBLE_DEVICES+set} ]]; then
        GPUS=$(visible_gpus)
        [[ -n $GPUS ]] || SMI=hidden
    fi
}

# The cards that CUDA_VISIBLE_DEVICES names, by index or UUID, up to the first that is not there. CUDA
# shows none at all where one is named twice (a GPU that is partitioned may be, for its slices).
visible_gpus() {
    local word line found index words seen=''
    IFS=, read -r -a words <<<"$CUDA_VISIBLE_DEVICES"
    for word in ${words[@]+"${words[@]}"}; do
        found='' index=0
        while IFS= read -r line; do
            case $(trim "$word") in
                "$index") found=$line ;;
                GPU-*) [[ ${line##*, } != "$(trim "$word")"* ]] || found=$line ;;
                MIG-*) [[ $line != *', Enabled, '* ]] || found=$line ;;
            esac
            index=$((index + 1))
        done <<<"$GPUS"
        [[ -n $found ]] || break
        [[ $seen != *"$found"$'\n'* || $(trim "$word") == MIG-* ]] || return 0
        seen+=$found$'\n'
    done
    printf '%s' "$seen"
}

# The first of CUDA's cards: that of the highest capability, unless CUDA_DEVICE_ORDER or
# CUDA_VISIBLE_DEVICES say otherwise.
choose_gpu() {
    GPU_NAME='' GPU_CC='' DRIVER='' GPU_COUNT=0 GPU_MIG=no GPU_OTHERS=''
    local index name cc driver mig
    while IFS=, read -r index name cc driver _ mig _; do
        [[ -n $index ]] || continue
        GPU_COUNT=$((GPU_COUNT + 1))
        name=$(trim "$name") cc=$(trim "$cc") driver=$(trim "$driver") mig=$(trim "$mig")
        [[ $cc =~ ^[0-9]+\.[0-9]$ ]] || cc=''
        if ((GPU_COUNT == 1)); then
            GPU_NAME=$name GPU_CC=$cc DRIVER=$driver
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
