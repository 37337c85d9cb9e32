"""Train the demo model: `codec`, then `diffusion`; `both` does one after the other.

Knows: pools of sounds, the loop, checkpoints. See README.md for the commands.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tools.demo_model import codec as codec_part
from tools.demo_model import tokenizer as tokenizer_part
from tools.demo_model.captions import Sound, draw
from tools.demo_model.diffusion import Pool, diffusion_loss
from tools.demo_model.model import SAMPLES_PER_LATENT, CodecBlock, DiTBlock, Sizes, StableAudio
from tools.demo_model.optim import Optimiser
from tools.demo_model.sounds import RATE, render
from tools.demo_model.text import TextEncoder
from torch import Tensor, nn

FRAMES = 56  # latents of the longest clip
TOKENS = 22  # prompt tokens while training; the context adds two
NOISY = ("noise", "silence")


def log(*words: object) -> None:
    """Talk at once."""
    print(*words, flush=True)


def draw_sounds(seed: int, count: int, free: float = 0.25) -> list[Sound]:
    """Sounds drawn from one seed."""
    r = Random(seed)
    return [draw(r, free) for _ in range(count)]


def make_pool(sounds: list[Sound], device: str, batch: int = 256) -> Tensor:
    """[N, 2, FRAMES · 4096] float16 audio of the sounds."""
    pool = torch.empty(len(sounds), 2, FRAMES * SAMPLES_PER_LATENT, dtype=torch.float16,
                       device=device)  # fmt: skip
    for start in range(0, len(sounds), batch):
        part = sounds[start : start + batch]
        pool[start : start + len(part)] = render(part, pool.shape[2], device).half()
    return pool


def save(model: nn.Module, path: Path, half: bool = True) -> None:
    """Weights as F16 (rotary tables F32)."""
    state = {
        name: (t if "inv_freq" in name or not half else t.half()).contiguous().cpu()
        for name, t in model.state_dict().items()
    }
    save_file(state, path)


def load(model: nn.Module, path: Path) -> None:
    """Weights of any precision into float32 parameters."""
    model.load_state_dict({k: v.float() for k, v in load_file(path).items()})


class Loop:
    """Repeats one step: as a CUDA graph on a GPU, plainly elsewhere."""

    def __init__(self, loss: Callable[[], tuple[Tensor, list[Tensor]]], optimiser: Optimiser):
        self.loss, self.optimiser = loss, optimiser
        self.graph: torch.cuda.CUDAGraph | None = None
        self.values = torch.zeros(1)
        if optimiser.rate.is_cuda:
            begin = time.monotonic()
            self._capture()
            log("captured after", f"{time.monotonic() - begin:.1f}s")

    def _step(self) -> Tensor:
        self.optimiser.clear()
        total, parts = self.loss()
        total.backward()
        norm = self.optimiser.step()
        return torch.stack([total.detach(), *(p.detach() for p in parts), norm])

    def _capture(self) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        self.optimiser.rate.fill_(0.02)
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self.optimiser.clear()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.values = self._step()

    def run(self, seconds: float, steps: int | None, note: str, every: int = 250,
            keep: Callable[[], None] | None = None,
            watch: Callable[[float], None] | None = None) -> list[list[float]]:  # fmt: skip
        """Go on until `seconds` of wall time or `steps` are over; returns the logged values."""
        begin, done, history, kept = time.monotonic(), 0, [], 0
        sums = None
        while True:
            spent = (time.monotonic() - begin) / seconds
            progress = done / steps if steps else spent
            if progress >= 1 or spent >= 1:
                break
            warm = min(1.0, done / 100)
            cool = min(1.0, (1 - progress) / 0.6)
            self.optimiser.rate.fill_(max(warm * cool, 1e-3))
            if watch and done % 50 == 0:
                watch(progress)
            if self.graph:
                self.graph.replay()
            else:
                self.values = self._step()
            sums = self.values.clone() if sums is None else sums + self.values
            done += 1
            if done % every == 0:
                mean = (sums / every).tolist()
                history.append(mean)
                sums = None
                log(note, done, f"{time.monotonic() - begin:.0f}s",
                    " ".join(f"{v:.4f}" for v in mean))  # fmt: skip
                if keep and int(progress * 3) > kept:
                    kept += 1
                    keep()
        log(note, "steps", done, "in", f"{time.monotonic() - begin:.1f}s")
        return history


def fuse(block: type[nn.Module], wanted: bool) -> Callable[..., Tensor]:
    """Compile the forward pass that all blocks of a kind share; returns the plain one."""
    plain = block.forward
    if wanted:
        block.forward = torch.compile(plain, fullgraph=True, dynamic=False)
    return plain


def train_codec(a: argparse.Namespace, sizes: Sizes, device: str) -> StableAudio:
    """Autoencoder; writes codec.safetensors (F16) and codec.json (quality on unheard sounds)."""
    torch.manual_seed(a.seed)
    model = StableAudio(sizes).to(device)
    begin = time.monotonic()
    sounds = draw_sounds(a.seed + 1, a.clips, free=0.4)
    pool = make_pool(sounds, device)
    if device == "cuda":
        torch.cuda.synchronize()
    log("pool", tuple(pool.shape), f"{time.monotonic() - begin:.1f}s")
    tonal = torch.tensor([0.1 if s.family in NOISY else 1.0 for s in sounds], device=device)
    seconds = torch.tensor([s.seconds for s in sounds], device=device)
    crops = codec_part.Crops(pool, seconds, tonal, a.batch, a.crop)
    optimiser = Optimiser(model.autoencoder.named_parameters(), a.muon, a.adam)
    autoencoder = model.autoencoder
    share = torch.full((), a.spectral, device=device)
    if a.resume_codec:
        load(model.autoencoder, Path(a.resume_codec))
    else:
        codec_part.wake(model.autoencoder, a.gamma, a.gain)
    plain = fuse(CodecBlock, a.compile)
    loop = Loop(lambda: codec_part.codec_loss(autoencoder, *crops.draw(), share, a.side),
                optimiser)  # fmt: skip
    out = Path(a.out)
    loop.run(a.codec_seconds, a.steps, "codec", a.every,
             lambda: save(autoencoder, out / "codec_part.safetensors"),
             lambda done: share.fill_(min(1.0, max(a.spectral, done / 0.3))))  # fmt: skip
    CodecBlock.forward = plain
    optimiser.averaged()
    drawn = torch.cat([crops.draw()[0] for _ in range(8)])
    codec_part.standardise(autoencoder, drawn, fold=False)
    codec_part.standardise(autoencoder, pool[:512], fold=True)
    save(autoencoder, out / "codec.safetensors")
    test = draw_sounds(a.seed + 99, min(a.clips, 384))
    report = codec_part.codec_report(autoencoder, make_pool(test, device), [
        f"{s.family}.{s.kind}" if s.family in ("drum", "noise", "tone") else s.family
        for s in test])  # fmt: skip
    log("codec SI-SDR dB, log-spectral distance dB, error of the side dB", json.dumps(report))
    (out / "codec.json").write_text(json.dumps(report, indent=1))
    return model


def train_diffusion(a: argparse.Namespace, sizes: Sizes, device: str, model: StableAudio) -> None:
    """DiT and text encoder; writes dit.safetensors, text.safetensors, tokenizer.json."""
    torch.manual_seed(a.seed + 5)
    out, begin = Path(a.out), time.monotonic()
    model.autoencoder.requires_grad_(False).eval()
    text = TextEncoder(sizes).to(device)
    sounds = draw_sounds(a.seed + 2, a.latent_clips)
    words = [s.caption for s in draw_sounds(a.seed + 3, 40_000)]
    tokens = tokenizer_part.learn(words, sizes.vocab)
    tokenizer_part.save(tokens, out)
    pool = encode_pool(model, tokens, sounds, device)
    log("latents", tuple(pool.latents.shape), f"{time.monotonic() - begin:.1f}s",
        f"std {pool.latents[:500].float().std():.3f}")  # fmt: skip
    both = nn.ModuleDict({"dit": model.model, "cond": model.conditioner, "text": text})
    if a.resume_dit:
        load(both, Path(a.resume_dit))
    optimiser = Optimiser(both.named_parameters(), a.muon, a.adam)
    fuse(DiTBlock, a.compile)
    loop = Loop(lambda: (diffusion_loss(model, text, pool, a.dit_batch, a.foreign), []), optimiser)

    def keep(name: str = "dit_part.safetensors") -> None:
        save(both, out / name)

    loop.run(a.dit_seconds, a.steps, "dit", a.every * 4, keep)
    keep("dit_raw.safetensors")
    optimiser.averaged()
    keep("dit.safetensors")


def encode_pool(model: StableAudio, tokens: Tokenizer, sounds: list[Sound], device: str) -> Pool:
    """Render, encode and tokenise the sounds, a piece at a time."""
    parts = [
        codec_part.latent_pool(model.autoencoder, make_pool(sounds[i : i + 2048], device))
        for i in range(0, len(sounds), 2048)
    ]
    ids, mask = tokenizer_part.encode(tokens, [s.caption for s in sounds], TOKENS)
    seconds = torch.tensor([s.seconds for s in sounds])
    frames = torch.ceil(seconds * RATE / SAMPLES_PER_LATENT).long()
    free = torch.tensor([s.offset > 0 for s in sounds])
    host = (torch.tensor(ids), torch.tensor(mask), seconds, frames, free)
    return Pool(torch.cat(parts), *(t.to(device) for t in host))


def main() -> None:
    """Parse and go."""
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("what", choices=["codec", "diffusion", "both"])
    p.add_argument("--out", default="output/demo")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--steps", type=int, help="steps of each part; without it, time decides")
    p.add_argument("--codec-seconds", type=float, default=240)
    p.add_argument("--dit-seconds", type=float, default=400)
    p.add_argument("--clips", type=int, default=12_000, help="clips for the autoencoder")
    p.add_argument("--latent-clips", type=int, default=36_000, help="clips for the DiT")
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--crop", type=int, default=16, help="latents in a piece for the autoencoder")
    p.add_argument("--dit-batch", type=int, default=256)
    p.add_argument("--foreign", type=float, default=0.6, help="share that keeps another clip")
    p.add_argument("--muon", type=float, default=2e-3)
    p.add_argument("--adam", type=float, default=1e-3)
    p.add_argument("--gamma", type=float, default=1.5, help="fast rotary dims of a fresh codec")
    p.add_argument("--gain", type=float, default=2.0, help="feed-forward gain of a fresh codec")
    p.add_argument("--spectral", type=float, default=0.1, help="spectral loss, first part")
    p.add_argument("--side", type=float, default=0.2, help="weight of the channels' levels")
    p.add_argument("--head", type=int, default=32, help="head dim of the autoencoder")
    p.add_argument("--every", type=int, default=250)
    p.add_argument("--codec", help="codec.safetensors to train the DiT on")
    p.add_argument("--resume-codec")
    p.add_argument("--resume-dit")
    p.add_argument("--compile", action="store_true", help="fuse each kind of block")
    a = p.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    Path(a.out).mkdir(parents=True, exist_ok=True)
    sizes = Sizes(ae_head_dim=a.head)
    if a.what in ("codec", "both"):
        model = train_codec(a, sizes, device)
        torch.cuda.empty_cache()
    else:
        torch.manual_seed(a.seed)
        model = StableAudio(sizes).to(device)
        if a.codec:
            load(model.autoencoder, Path(a.codec))
    if a.what in ("diffusion", "both"):
        train_diffusion(a, sizes, device, model)


if __name__ == "__main__":
    main()
