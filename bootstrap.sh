#!/usr/bin/env bash
# Fetches the project and runs its install.sh: curl -LsSf …/bootstrap.sh | bash -s -- [options of install.sh]
#
# environment: SA3_DIR (where to, default ./sa3-trt), SA3_SOURCE (a git address, or the address of a
# .tar.gz), SA3_REF (branch or tag)
set -euo pipefail

# everything is in a function: a script cut off in the pipe does nothing
main() {
    local target=${SA3_DIR:-sa3-trt} source=${SA3_SOURCE:-} ref=${SA3_REF:-main}
    if [[ -x $target/install.sh ]]; then
        echo "· $target is there already: updating nothing, installing what is missing" >&2
    elif [[ -z $source ]]; then
        echo "bootstrap.sh: set SA3_SOURCE to the project's git address or to a .tar.gz of it" >&2
        exit 2
    elif [[ $source == *.tar.gz ]]; then
        fetch_archive "$source" "$target"
    elif command -v git >/dev/null; then
        echo "· cloning $source into $target" >&2
        rm -rf "$target.part"
        git clone --quiet --depth 1 --branch "$ref" "$source" "$target.part"
        mv "$target.part" "$target"
    else
        fetch_archive "${source%.git}/archive/$ref.tar.gz" "$target"
    fi
    # questions go to the terminal, not to the pipe this script came through
    if [[ ! -t 0 && -t 2 ]] && (: </dev/tty) 2>/dev/null; then
        exec "$target/install.sh" "$@" </dev/tty
    fi
    exec "$target/install.sh" "$@" </dev/null
}

fetch_archive() { # fetch_archive ADDRESS TARGET
    echo "· fetching $1" >&2
    rm -rf "$2.part"
    mkdir -p "$2.part"
    if command -v curl >/dev/null; then
        curl -LsSf "$1" | tar -xz -C "$2.part" --strip-components 1
    elif command -v wget >/dev/null; then
        wget -qO- "$1" | tar -xz -C "$2.part" --strip-components 1
    else
        echo "bootstrap.sh: neither git nor curl nor wget is here; install one of them" >&2
        exit 1
    fi
    mv "$2.part" "$2"
}

main "$@"
