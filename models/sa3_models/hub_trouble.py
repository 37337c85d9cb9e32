"""What went wrong between this machine and the hub, in words a person can act on.

Knows: HTTP answers, huggingface-hub's and the system's exceptions. Doesn't know: files, retries.
"""

from __future__ import annotations

import errno
import re
from pathlib import Path

from sa3_models.errors import ArtefactMissing, RunFailed, Sa3Error

__all__ = ["Again", "disk_trouble", "explain"]


class Again(Exception):
    """Worth another attempt. after: seconds the server asked to wait. hint: if none helps."""

    def __init__(self, what: str, *, after: float = 0.0, hint: str = "") -> None:
        super().__init__(what)
        self.what, self.after = what, after
        self.hint = hint or "run the same command later: it goes on where it stopped"


def explain(error: Exception, repo: str, what: str) -> Exception:
    """What an exception of a transfer means: an `Sa3Error`, or `Again` where waiting may help."""
    import httpx2
    from huggingface_hub import constants, errors, get_token

    if isinstance(error, Sa3Error | Again):
        return error
    page = f"{constants.ENDPOINT}/{repo}"
    log_in = "log in with `hf auth login` or set HF_TOKEN (tokens: huggingface.co/settings/tokens)"
    if isinstance(error, errors.OfflineModeIsEnabled):
        return ArtefactMissing(f"offline: {what} of {repo} is not here", hint="go online")
    response = getattr(error, "response", None)
    status = response.status_code if response is not None else 0
    token = get_token()
    if status == 401 and token:
        return ArtefactMissing(
            "the hub does not accept the token",
            found="it is wrong or has expired (from HF_TOKEN or the stored login)",
            hint=log_in,
        )
    if isinstance(error, errors.GatedRepoError) and not token:
        return ArtefactMissing(
            f"{repo} asks you to accept its terms and to log in",
            hint=f"accept the terms at {page}, then {log_in}",
        )
    if isinstance(error, errors.GatedRepoError):
        return ArtefactMissing(
            f"the terms of {repo} are not accepted yet",
            found="the token is valid, its account has no access",
            hint=f"accept them at {page} and run this again",
        )
    if status == 401:
        return ArtefactMissing(
            f"{repo} is private or does not exist, and there is no token",
            hint=f"look at {page}; {log_in}",
        )
    if status == 403:
        return ArtefactMissing(
            f"the hub refuses {what} of {repo}",
            found="403; a fine-grained token must be allowed to read gated repositories",
            hint=f"accept the terms at {page}, check the token's permissions",
        )
    if isinstance(error, errors.EntryNotFoundError):
        return ArtefactMissing(
            f"{repo} has no file {what}", hint="update this project: the file may have moved"
        )
    if status == 404:
        return ArtefactMissing(f"the hub has no repository {repo}", hint=f"look at {page}")
    if status in (408, 429) or status >= 500:
        after = response.headers.get("Retry-After", "") if response is not None else ""
        reason = "limits requests" if status == 429 else "has trouble"
        wait = float(after) if after.isdigit() else 0.0
        return Again(f"the hub {reason} ({status})", after=wait)
    if isinstance(error, httpx2.ProxyError):
        return RunFailed(
            "the proxy does not let us through",
            found=_plain(str(error)),
            hint="check HTTPS_PROXY, HTTP_PROXY and NO_PROXY",
        )
    if isinstance(error, httpx2.ConnectError) and "certificate" in str(error).lower():
        return RunFailed(
            f"the certificate of {_host(constants.ENDPOINT)} is not trusted",
            found=_plain(str(error)),
            hint="behind a company's proxy: set SSL_CERT_FILE to its certificates",
        )
    if isinstance(error, httpx2.TimeoutException):
        return Again("no data came for too long")
    if isinstance(error, httpx2.ConnectError):
        host = _host(constants.ENDPOINT)
        if proxy := _proxy(constants.ENDPOINT):
            return Again(
                f"{host} cannot be reached through the proxy {proxy}: {_plain(str(error))}",
                hint="check HTTPS_PROXY, HTTP_PROXY and NO_PROXY",
            )
        return Again(f"{host} cannot be reached: {_plain(str(error))}")
    if isinstance(error, httpx2.HTTPError):
        return Again(_plain(f"{type(error).__name__} {error}"))
    if isinstance(error, ValueError) and "json" in type(error).__name__.lower():
        return RunFailed(
            f"the answer of {_host(constants.ENDPOINT)} is not what the hub sends",
            found="not JSON",
            hint="a proxy or a log-in page may be in between, or HF_ENDPOINT is wrong",
        )
    if isinstance(error, OSError):
        raise error
    return RunFailed(f"{what} of {repo} could not be fetched", found=_plain(repr(error)))


def disk_trouble(error: OSError, target: Path) -> RunFailed:
    """A full, read-only or broken disk, in words."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return RunFailed(
            f"the disk is full: {target.name} could not be written",
            found=f"in {target.parent}",
            hint="make room (`sa3 list`, `sa3 rm MODEL`) or move SA3_HOME, then run this again",
        )
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return RunFailed(
            f"{target.parent} cannot be written to",
            found=error.strerror,
            hint="set SA3_HOME to a folder of yours",
        )
    return RunFailed(f"{target} could not be written", found=str(error))


def _plain(text: str) -> str:
    """A message without queries (they may carry signatures) and without users of addresses."""
    text = re.sub(r"(https?://)[^/\s@]*@", r"\1", text)
    return re.sub(r"(https?://[^\s?'\"]+)\?[^\s'\"]*", r"\1", text)


def _proxy(address: str) -> str:
    """Host of the proxy that requests to an address go through, "" for none."""
    from urllib.request import getproxies, proxy_bypass

    proxies = getproxies()
    proxy = proxies.get(address.partition(":")[0]) or proxies.get("all", "")
    return "" if proxy_bypass(_host(address)) else _host(proxy)


def _host(address: str) -> str:
    return re.sub(r"^https?://(?:[^/@]*@)?", "", address).split("/")[0]
