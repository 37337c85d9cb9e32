"""A gate between two runs: does sound come through a codec, and on its side? Seconds on a CPU.

`python -m tools.demo_model.check output/demo/codec.safetensors` exits 1 unless nine in ten of the
panned sounds lean 6 dB or more to their side, and the sounds of the middle stay within 3 dB of it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from tools.demo_model.captions import Sound, hertz
from tools.demo_model.codec import round_trip, side_db
from tools.demo_model.model import SAMPLES_PER_LATENT, Autoencoder, Sizes
from tools.demo_model.sounds import render
from tools.demo_model.train import load

LATENTS = 16
SOUNDS = (
    *(("tone", kind, note) for kind in ("sine", "square", "saw", "organ", "flute")
      for note in (45, 52, 69)),
    *(("struck", kind, 60) for kind in ("pluck", "piano", "bell", "marimba")),
    *(("chord", kind, 55) for kind in ("pad", "organ", "saw")),
    *(("drum", kind, 0) for kind in ("kick", "snare", "hat", "open", "clap", "tom")),
    *(("noise", kind, 0) for kind in ("white", "rain", "wind", "waves")),
    *(("sweep", kind, 0) for kind in ("rising", "siren", "laser")),
    *(("beat", kind, 0) for kind in ("rock", "hats")),
)  # fmt: skip
PANS = {"left": (1.0, 0.05), "middle": (1.0, 1.0), "right": (0.05, 1.0)}


def sound(family: str, kind: str, note: int) -> Sound:
    """One of `SOUNDS`, 1.4 s long."""
    notes = [hertz(note + step) for step in ((0, 4, 7) if family == "chord" else (0,))]
    return Sound(family, kind, "", 1.4, notes if note else [], tempo=120.0, seed=1)


def main() -> None:
    """Parse, measure, print, judge."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("codec", type=Path)
    p.add_argument("--head", type=int, default=32, help="head dim of the autoencoder")
    a = p.parse_args()
    codec = Autoencoder(Sizes(ae_head_dim=a.head)).eval()
    load(codec, a.codec)
    audio = render([sound(*s) for s in SOUNDS], LATENTS * SAMPLES_PER_LATENT)
    audio = audio.mean(1, keepdim=True)
    rows = []
    for pan in PANS.values():
        want = audio * torch.tensor(pan)[:, None]
        got = round_trip(codec, want)
        loud = [x.square().mean((1, 2)) + 1e-9 for x in (got, want)]
        error = (got - want).square().mean((1, 2)) / loud[1]
        rows.append((side_db(got), 10 * (loud[0] / loud[1]).log10(), -10 * error.log10()))
    print("left over right in dB, level in dB, SNR in dB:", *PANS)
    for i, (family, kind, note) in enumerate(SOUNDS):
        cells = (f"{side[i]:6.1f} {level[i]:6.1f} {snr[i]:6.1f}" for side, level, snr in rows)
        print(f"{family + ' ' + kind + ' ' + str(note or ''):18}", " | ".join(cells))
    leaning = torch.cat([rows[0][0] >= 6, rows[2][0] <= -6]).float().mean().item()
    middle = (rows[1][0].abs() <= 3).float().mean().item()
    print(f"on their side {100 * leaning:.0f} %, in the middle {100 * middle:.0f} %")
    sys.exit(0 if leaning >= 0.9 and middle >= 0.9 else 1)


if __name__ == "__main__":
    main()
