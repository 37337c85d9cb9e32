"""Pulls: what arrives is whole, what goes wrong is said, and the next run succeeds."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from sa3_models import hub_trouble, store
from sa3_models.catalogue import resolve
from sa3_models.errors import ArtefactMissing, RunFailed, Sa3Error
from sa3_models.hub import Hub
from sa3_models.wants import (
    published_architectures,
    want_checkpoint,
    want_engines,
    want_onnx,
    want_settings,
)

MUSIC = "stabilityai/stable-audio-3-small-music"
PUBLISHED = "stabilityai/stable-audio-3-optimized"
ROOT = Path(__file__).parents[2]
TOKEN = "hf_0123456789secret"


def pull(want=None, **options):
    options = {"patience": 0.3, "tries": 2} | options
    return store.pull(want or want_checkpoint(resolve("sm-music")), hub=Hub(**options))


@pytest.fixture
def folder(home):
    return home / "checkpoints" / "small-music"


@pytest.fixture
def whole(hub):
    """What a complete checkpoint folder holds."""
    files = hub.repos[MUSIC]
    return {
        name: data for name, data in files.items() if name not in (".gitattributes", "README.md")
    }


def test_a_pull_brings_every_file_once_and_a_second_one_asks_nothing(hub, folder, whole, files_in):
    """CASES 16: a complete install makes no request at all."""
    pull()
    assert files_in(folder) == whole
    assert len(hub.requests("model.safetensors")) == 4  # two files, each here and at the storage
    before = len(hub.seen)
    assert pull() == ()
    assert pull(offline=True) == ()
    assert len(hub.seen) == before
    assert not any(path.is_symlink() for path in folder.rglob("*"))


def test_nothing_is_stored_twice(hub, home, tmp_path):
    pull()
    everything = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path.name for path in everything].count("model.safetensors") == 2  # DiT, text encoder
    assert sum(path.stat().st_size for path in everything) < 375_000


@pytest.fixture
def fresh_session():
    """The hub's client reads proxies when it is made: make a new one, now and afterwards."""
    from huggingface_hub import close_session

    yield close_session
    close_session()


RETRIED = {  # faults that one more attempt overcomes, and what is said when they stay
    "cut": (lambda f: f.Fault(cut=100_000), "the connection ended|peer closed", 1),
    "stall": (lambda f: f.Fault(stall=100_000), "no data came", 1),
    "trickle": (lambda f: f.Fault(trickle=True), "only .* bytes came", 1),
    "longer": (lambda f: f.Fault(longer=5), "announces 300,005 bytes", 1),
    "shorter": (lambda f: f.Fault(longer=-5), "announces 299,995 bytes", 1),
    "wrong content": (lambda f: f.Fault(flip=True), "wrong hash", 1),
    "too many requests": (lambda f: f.Fault(status=429), r"limits requests \(429\)", 1),
    "server error": (lambda f: f.Fault(status=500), r"has trouble \(500\)", 1),
    "gateway": (lambda f: f.Fault(status=504), r"has trouble \(504\)", 1),
    "redirected in circles": (lambda f: f.Fault(redirects=True), "redirect", 1),
}
REFUSED = {  # faults that are final at once
    "a web page": (lambda f: f.Fault(html=True), "a web page came instead", 1),
    "forbidden": (lambda f: f.Fault(status=403), "the hub refuses", 3),
    "gone": (lambda f: f.Fault(status=404, code="EntryNotFound"), "has no file", 3),
}


@pytest.mark.parametrize("name", [*RETRIED, *REFUSED])
def test_a_fault_is_named_leaves_no_file_and_the_next_run_succeeds(
    name, hub, fake_hub, folder, whole, files_in
):
    """CASES 01, 10, 19."""
    make, said, code = (RETRIED | REFUSED)[name]
    hub.fail("model.safetensors", *[make(fake_hub) for _ in range(8)])
    with pytest.raises(Sa3Error, match=said) as caught:
        pull()
    assert caught.value.exit_code == code
    assert caught.value.hint
    assert not (folder / "model.safetensors").exists()
    assert not store.complete(want_checkpoint(resolve("sm-music")))
    hub.faults.clear()
    pull()
    assert files_in(folder) == whole


@pytest.mark.parametrize("name", RETRIED)
def test_a_passing_fault_is_overcome_in_the_same_run(name, hub, fake_hub, folder, whole, files_in):
    hub.fail("model.safetensors", RETRIED[name][0](fake_hub))
    pull()
    assert files_in(folder) == whole


def test_a_cut_transfer_is_continued_not_begun_again(hub, fake_hub, folder, whole, files_in):
    hub.fail("model.safetensors", *[fake_hub.Fault(cut=100_000)] * 2)
    with pytest.raises(RunFailed):
        pull()
    [part] = folder.glob("*.part")
    assert part.stat().st_size == 200_000
    pull()
    assert hub.requests("model.safetensors")[-3].range == "bytes=200000-"
    assert files_in(folder) == whole


def test_a_partial_file_of_another_version_is_never_continued(hub, fake_hub, folder, files_in):
    hub.fail("model.safetensors", *[fake_hub.Fault(cut=100_000)] * 2)
    with pytest.raises(RunFailed):
        pull()
    new = bytes(reversed(hub.repos[MUSIC]["model.safetensors"]))
    hub.repos[MUSIC]["model.safetensors"] = new
    pull()
    assert files_in(folder)["model.safetensors"] == new
    assert not list(folder.rglob("*.part"))


def test_retries_go_on_while_bytes_arrive(hub, fake_hub, folder):
    """Tries are counted only while nothing comes: a bad line still brings a large file."""
    hub.repos[MUSIC]["model.safetensors"] = os.urandom(8 << 20)
    hub.fail("model.safetensors", *[fake_hub.Fault(cut=(1 << 20) + 70_000)] * 6)
    pull()
    assert store.complete(want_checkpoint(resolve("sm-music")))


def test_a_truncated_file_is_noticed_and_fetched_again(hub, folder, whole, files_in):
    """CASES 01, second variant."""
    pull()
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert store.missing(want_checkpoint(resolve("sm-music"))) == ["model.safetensors"]
    seen = len(hub.seen)
    pull()
    assert files_in(folder) == whole
    fetched = {request.path for request in hub.seen[seen:] if request.storage}
    assert len(fetched) == 1  # the others stay


def test_a_new_version_replaces_files_of_the_same_size(hub, folder):
    pull()
    new = os.urandom(300_000)
    hub.repos[MUSIC]["model.safetensors"] = new
    (folder / "model_config.json").unlink()
    pull()
    assert (folder / "model.safetensors").read_bytes() == new


def test_files_put_there_by_hand_are_used_if_they_are_right(hub, folder, whole):
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(whole["model.safetensors"])
    (folder / "model_config.json").write_bytes(b"x" * len(whole["model_config.json"]))
    pull()
    assert len(hub.requests("resolve")) == len(whole) - 1
    assert (folder / "model_config.json").read_bytes() == whole["model_config.json"]


# --------------------------------------------------------------------------------------- access


def test_without_a_token_a_gated_model_names_page_and_login(hub, folder):
    """CASES 19: no token."""
    hub.gated.add(MUSIC)
    with pytest.raises(ArtefactMissing, match="accept its terms and to log in") as caught:
        pull()
    assert f"{hub.url}/{MUSIC}" in caught.value.hint
    assert "hf auth login" in caught.value.hint
    assert not (folder / "model.safetensors").exists()


def test_with_a_token_terms_that_are_not_accepted_are_named(hub, monkeypatch):
    """CASES 19: terms not accepted."""
    hub.gated.add(MUSIC)
    hub.tokens[TOKEN] = set()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with pytest.raises(ArtefactMissing, match=r"terms of .* are not accepted yet"):
        pull()


def test_a_wrong_token_is_named(hub, monkeypatch):
    """CASES 19: bad token."""
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(ArtefactMissing, match="does not accept the token") as caught:
        pull()
    assert "hf_wrong" not in str(caught.value)


def test_a_private_or_absent_repository_is_named(hub, monkeypatch):
    hub.private.add(MUSIC)
    with pytest.raises(ArtefactMissing, match="private or does not exist, and there is no token"):
        pull()
    hub.tokens[TOKEN] = set()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with pytest.raises(ArtefactMissing, match="the hub has no repository"):
        pull()


def test_a_stored_login_is_used_and_its_token_stays_with_the_hub(hub, whole, files_in, folder):
    """The storage host, another origin, never sees the token."""
    hub.gated.add(MUSIC)
    hub.tokens[TOKEN] = {MUSIC}
    from huggingface_hub import constants

    Path(constants.HF_TOKEN_PATH).parent.mkdir(parents=True)
    Path(constants.HF_TOKEN_PATH).write_text(TOKEN)
    pull()
    assert files_in(folder) == whole
    assert {seen.token for seen in hub.seen if seen.storage} == {None}
    assert {seen.token for seen in hub.seen if not seen.storage} == {f"Bearer {TOKEN}"}


# -------------------------------------------------------------------------------------- network


def test_offline_names_the_missing_files_and_asks_nobody(hub, folder):
    """CASES 16."""
    pull()
    (folder / "model.safetensors").unlink()
    seen = len(hub.seen)
    with pytest.raises(ArtefactMissing, match="offline") as caught:
        pull(offline=True)
    assert "model.safetensors" in str(caught.value)
    assert len(hub.seen) == seen


def test_an_unreachable_hub_is_named(hub):
    hub.close()
    with pytest.raises(RunFailed, match="cannot be reached") as caught:
        pull()
    assert caught.value.exit_code == 1


def test_a_proxy_that_is_down_is_named(hub, fresh_session, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://me:pass1234@127.0.0.1:9")
    monkeypatch.setenv("http_proxy", "http://me:pass1234@127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "example.org")
    fresh_session()
    with pytest.raises(RunFailed, match=r"through the proxy 127\.0\.0\.1:9") as caught:
        pull()
    assert "HTTPS_PROXY" in caught.value.hint
    assert "pass1234" not in str(caught.value)


def test_a_proxy_that_refuses_is_named_without_its_password():
    import httpx2

    error = httpx2.ProxyError("407 from http://me:pass@proxy.example:3128/?x=1")
    told = hub_trouble.explain(error, MUSIC, "model.safetensors")
    assert "proxy" in told.what
    assert "HTTPS_PROXY" in told.hint
    assert "pass" not in str(told)


def test_a_log_in_page_instead_of_the_api_is_named(hub, fake_hub):
    hub.fail("api", *[fake_hub.Fault(html=True)] * 3)
    with pytest.raises(RunFailed, match="not what the hub sends"):
        pull()


def test_signed_addresses_do_not_reach_a_message(hub, fake_hub):
    hub.fail("model.safetensors", *[fake_hub.Fault(status=418)] * 3)
    with pytest.raises(RunFailed) as caught:
        pull()
    assert "very-secret" not in str(caught.value)


# ----------------------------------------------------------------------------------------- disk


def test_a_disk_too_small_is_named_before_anything_is_fetched(hub, folder, monkeypatch):
    usage = shutil.disk_usage(folder.parents[2])
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1_000))
    with pytest.raises(RunFailed, match="not enough room"):
        pull()
    assert not hub.requests("resolve")


def test_a_disk_that_fills_up_is_named(hub, folder, monkeypatch):
    def full(self, *_args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Hub, "_copy", full)
    with pytest.raises(RunFailed, match="the disk is full"):
        pull()
    assert not (folder / "model_config.json").exists()


def test_a_folder_that_cannot_be_written_is_named(hub, home):
    home.parent.mkdir(exist_ok=True)
    home.write_text("a file where the folder should be")
    with pytest.raises(RunFailed) as caught:
        pull()
    assert str(home) in str(caught.value)
    told = hub_trouble.disk_trouble(OSError(errno.EROFS, "Read-only file system"), home / "x")
    assert "cannot be written" in told.what
    assert "SA3_HOME" in told.hint


# ---------------------------------------------------------------------------- the hub's own cache


def fill_cache(repo, files, commit="c" * 40):
    """The hub's cache as its own library lays it out: blobs, and links to them in a snapshot."""
    import hashlib

    from huggingface_hub import constants

    root = Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"
    (root / "refs").mkdir(parents=True)
    (root / "blobs").mkdir()
    (root / "refs" / "main").write_text(commit)
    for name, data in files.items():
        git = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        blob = root / "blobs" / (hashlib.sha256(data).hexdigest() if len(data) >= 1000 else git)
        blob.write_bytes(data)
        link = root / "snapshots" / commit / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    return root


@pytest.mark.parametrize("offline", [False, True])
def test_files_of_the_hubs_cache_are_linked_not_fetched(offline, hub, whole, folder, files_in):
    """One copy on the disk, and real files beside each other (CASES 14), also offline."""
    root = fill_cache(MUSIC, hub.repos[MUSIC])
    pull(offline=offline)
    assert files_in(folder) == whole
    assert not hub.requests("resolve")
    blobs = {path.stat().st_ino for path in (root / "blobs").iterdir()}
    for name in whole:
        assert not (folder / name).is_symlink()
        assert (folder / name).stat().st_ino in blobs


def test_engines_of_the_hubs_cache_are_linked_offline_too(hub, home, files_in):
    fill_cache(PUBLISHED, hub.repos[PUBLISHED])
    for want in want_engines(resolve("sm-music"), "sm_90")[0]:
        pull(want, offline=True)
    assert len(files_in(home / "sm_90")) == 4
    assert not hub.seen


def test_a_damaged_file_of_the_hubs_cache_is_fetched_instead(hub, whole, folder, files_in):
    root = fill_cache(MUSIC, hub.repos[MUSIC])
    for blob in (root / "blobs").iterdir():
        if blob.stat().st_size == 300_000:
            blob.write_bytes(b"x" * 300_000)
    pull()
    assert files_in(folder) == whole
    assert len(hub.requests("resolve")) == 1


# ------------------------------------------------------------------------------------ two at once


def test_two_pulls_share_one_download(hub, whole, folder, files_in):
    hub.pace = lambda: hub.wait(0.02)
    waited = []

    class Report(store.Reporter):
        def waiting(self, label):
            waited.append(label)

    def one():
        store.pull(want_checkpoint(resolve("sm-music")), hub=Hub(), report=Report())

    threads = [threading.Thread(target=one) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert files_in(folder) == whole
    assert waited == ["checkpoint of small-music"]
    assert len([seen for seen in hub.seen if seen.storage]) == 3


# ------------------------------------------------------------------------------ published artefacts


def test_engines_land_in_the_published_layout(hub, home, files_in):
    wants, useless = want_engines(resolve("sm-music"), "9.0")
    assert useless == ()
    for want in wants:
        pull(want)
    assert set(files_in(home / "sm_90")) == {
        "t5gemma/t5gemma_fp16.trt",
        "sa3-sm-music/dit_fp16.trt",
        "same-s/enc_bf16_chunkable.trt",
        "same-s/dec_bf16_chunkable_limiter.trt",
    }
    published = hub.repos[PUBLISHED]
    for name, data in files_in(home / "sm_90").items():
        assert data == published[f"tensorRT/sm_90/{name}"]


def test_a_precision_is_taken_where_it_is_published(hub):
    wants, _ = want_engines(resolve("sm-music"), "sm_90", "fp8")
    assert {want.group for want in wants} >= {"dit_fp8.trt", "t5gemma_fp16.trt"}
    assert "dit_fp16.trt" not in {want.group for want in wants}


def test_engines_that_need_a_plugin_are_told_apart(hub):
    wants, useless = want_engines(resolve("medium"), "sm_90")
    assert {want.folder.name for want in wants} == {"t5gemma", "sa3-m"}
    assert {row.dir for row in useless} == {"same-l"}


def test_an_architecture_that_is_not_published_names_those_that_are(hub):
    wants, _ = want_engines(resolve("sm-music"), "sm_86")
    with pytest.raises(ArtefactMissing, match="sm_86") as caught:
        pull(wants[0])
    assert "sm_120, sm_90" in caught.value.found
    assert "sa3 build" in caught.value.hint


def test_architectures_are_read_from_the_repository(hub):
    hub.repos[PUBLISHED]["tensorRT/sm_89/t5gemma/t5gemma_fp16.trt"] = b"x"
    assert published_architectures(Hub()) == ("sm_89", "sm_90", "sm_120")


@pytest.mark.parametrize("layout", ["fetched", "linked"])
def test_graphs_come_with_their_weights_as_real_files(layout, hub, home):
    """CASES 14: external data beside the graph, no link that leaves the folder."""
    if layout == "linked":
        fill_cache(PUBLISHED, hub.repos[PUBLISHED])
    for want in want_onnx(resolve("sm-music")):
        pull(want)
    dit = home / "onnx" / "published" / "sa3-sm-music"
    assert {path.name for path in dit.iterdir()} == {"dit.onnx", "dit.onnx.data", ".pulled.json"}
    assert not any(path.is_symlink() for path in home.rglob("*"))


@pytest.mark.parametrize("layout", ["fetched", "linked"])
def test_a_pulled_graph_with_external_weights_runs(layout, hub, home, tmp_path):
    """CASES 14: taken from a cache of links, below a folder with a space and an umlaut."""
    import numpy as np
    import onnxruntime as ort

    import onnx
    from onnx import TensorProto, helper, numpy_helper

    weight = np.arange(512, dtype=np.float32)
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["velocity"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [512])],
        [helper.make_tensor_value_info("velocity", TensorProto.FLOAT, [512])],
        [numpy_helper.from_array(weight, "w")],
        doc_string="x" * 1000,  # large enough for the hub's large-file storage
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    made = tmp_path / "made" / "dit.onnx"
    made.parent.mkdir()
    onnx.save(model, made, save_as_external_data=True, location="dit.onnx.data", size_threshold=0)
    for name in ("dit.onnx", "dit.onnx.data"):
        hub.repos[PUBLISHED][f"onnx/sa3-sm-music/{name}"] = (made.parent / name).read_bytes()
    if layout == "linked":
        fill_cache(PUBLISHED, hub.repos[PUBLISHED])
    for want in want_onnx(resolve("sm-music")):
        pull(want)
    pulled = home / "onnx" / "published" / "sa3-sm-music" / "dit.onnx"
    session = ort.InferenceSession(pulled, providers=["CPUExecutionProvider"])
    [result] = session.run(None, {"x": np.ones(512, np.float32)})
    np.testing.assert_array_equal(result, weight + 1)


def test_weights_of_another_name_are_fetched_too(hub, home):
    wants = [want for want in want_onnx(resolve("medium"), "fp8") if want.group == "dit_fp8.onnx"]
    pull(wants[0])
    assert (home / "onnx" / "published" / "sa3-m" / "dit_fp8lin.onnx.data").exists()


def test_settings_are_the_small_files(hub, folder, files_in):
    pull(want_settings(resolve("sm-music")))
    assert all(name.endswith(".json") for name in files_in(folder))
    assert "t5gemma-b-b-ul2/tokenizer.json" in files_in(folder)
    assert not store.complete(want_checkpoint(resolve("sm-music")))


def test_a_sharded_checkpoint_is_taken_with_its_index(hub, folder, files_in):
    files = hub.repos[MUSIC]
    data = files.pop("model.safetensors")
    files["model-00001-of-00002.safetensors"] = data[:150_000]
    files["model-00002-of-00002.safetensors"] = data[150_000:]
    files["model.safetensors.index.json"] = b"{}"
    pull()
    assert "model.safetensors.index.json" in files_in(folder)
    assert "model-00002-of-00002.safetensors" in files_in(folder)


def test_a_checkpoint_repository_without_weights_is_refused(hub, folder):
    del hub.repos[MUSIC]["model.safetensors"]
    with pytest.raises(ArtefactMissing, match=r"lacks model\.safetensors"):
        pull()


# ------------------------------------------------------------------------------------ interrupted

NURSERY = """
import os, sys
from huggingface_hub import HfApi, get_session
from sa3_models import store
from sa3_models.catalogue import resolve
from sa3_models.wants import want_checkpoint
for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        try:
            store.pull(want_checkpoint(resolve("sm-music")))
        finally:
            os._exit(0)
    print(pid, flush=True)
    os.waitpid(pid, 0)
    print("ended", flush=True)
"""


@pytest.fixture
def nursery(hub):
    """Starts pulls in processes of their own, fast: a process with everything imported forks."""
    process = subprocess.Popen(
        [sys.executable, "-c", NURSERY],
        env=os.environ | {"PYTHONPATH": str(ROOT / "models")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )

    def pull_until(seconds: float, how: int) -> bool:
        """Start a pull, send it a signal after a while; whether the signal still met it."""
        process.stdin.write("go\n")
        process.stdin.flush()
        pid = int(process.stdout.readline())
        time.sleep(seconds)
        met = Path(f"/proc/{pid}/cmdline").exists() and bool(
            Path(f"/proc/{pid}/cmdline").read_bytes()
        )
        os.kill(pid, how) if met else None
        assert process.stdout.readline() == "ended\n"
        return met

    yield pull_until
    process.stdin.close()
    process.wait(20)
    process.stdout.close()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_killed_at_any_time_the_store_is_never_wrong(how, hub, nursery, folder, whole, files_in):
    """CASES 01, third variant: 25 pulls with each signal, at moments spread over the transfer."""
    hub.repos[MUSIC]["model.safetensors"] = whole["model.safetensors"] = os.urandom(2 << 20)
    hub.pace = lambda: hub.wait(0.005)
    want = want_checkpoint(resolve("sm-music"))
    chance = random.Random(int(how))
    interrupted = 0
    for _ in range(25):
        interrupted += nursery(chance.uniform(0.0, 0.35), how)
        for name, data in files_in(folder).items():
            if not name.endswith(".part"):
                assert data == whole[name], f"{name} has its name and is not whole"
        if store.complete(want):
            assert files_in(folder) == whole
            shutil.rmtree(folder)
    assert interrupted >= 15  # most of them met a pull at work
    hub.pace = lambda: None
    pull()
    assert files_in(folder) == whole
